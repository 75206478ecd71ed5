"""The recipes: small programs that come with the library, each a file to copy and to start from. They are read, never run."""

from __future__ import annotations

import ast
import dataclasses as dc
from pathlib import Path

from dovetail.base.errors import FileError, names_or_nearest

PACKAGE = Path(__file__).parents[1]


@dc.dataclass(frozen=True)
class RecipeFile:
    """A recipe: its name, the first line of its docstring, and its file."""

    name: str
    summary: str
    path: Path


def recipe_files() -> list[RecipeFile]:
    """Return the recipes by name, those of the installed package or of the checkout that it is run from."""
    folder = PACKAGE / "recipes"
    folder = folder if folder.is_dir() else PACKAGE.parents[1] / "recipes"
    return [_described(path) for path in sorted(folder.glob("*.py")) if path.stem != "run"]


def find_recipe(name: str) -> RecipeFile:
    """Return the recipe of this name."""
    known = {recipe.name: recipe for recipe in recipe_files()}
    if name not in known:
        raise FileError(f"no recipe is called {name!r}; {names_or_nearest(name, list(known), 'recipes')}")
    return known[name]


def _described(path: Path) -> RecipeFile:
    about = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return RecipeFile(path.stem, about.partition("\n")[0], path)
