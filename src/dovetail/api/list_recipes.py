"""List the recipes: small programs that train, look inside or serve, assert what they show, and draw a picture.

dovetail recipes
dovetail recipes copy induction
python induction.py --quick
"""

from __future__ import annotations

import dataclasses as dc
from typing import Any

from dovetail.api.result import ListResult
from dovetail.files.recipes import RecipeFile, recipe_files
from dovetail.views.blocks import TextTable, View, styled


@dc.dataclass(frozen=True, repr=False)
class RecipeList(ListResult[RecipeFile]):
    """The recipes by name."""

    recipes: tuple[RecipeFile, ...]

    def to_dict(self) -> dict[str, Any]:
        return {"recipes": [{"name": recipe.name, "summary": recipe.summary} for recipe in self.recipes]}

    def view(self, width: int) -> View:
        rows = [(styled((recipe.name, "bold")), recipe.summary) for recipe in self.recipes]
        below = styled(("dovetail recipes copy NAME writes one to start from", "dim"))
        return [TextTable(("name", "summary"), rows, header=False), "", below]


def list_recipes() -> RecipeList:
    """Return the recipes that come with the library, each a program in one file."""
    return RecipeList(tuple(recipe_files()))
