"""Copy a recipe to a file, to run and to change.

dovetail recipes copy induction
dovetail recipes copy induction -o mine.py
"""

from __future__ import annotations

import dataclasses as dc
from pathlib import Path
from typing import Annotated, Any

from dovetail.api.options import OutFile
from dovetail.api.result import Result
from dovetail.base.option import Option
from dovetail.disk.atomic import write_new
from dovetail.files.recipes import find_recipe
from dovetail.views.blocks import View


@dc.dataclass(frozen=True, repr=False)
class CopiedRecipe(Result):
    """A recipe, and where it was written."""

    recipe: str
    out: Path

    def to_dict(self) -> dict[str, Any]:
        return {"recipe": self.recipe, "file": str(self.out)}

    def view(self, width: int) -> View:
        return f"{self.out}; python {self.out} runs it"


def copy_recipe(
    name: Annotated[str, Option("A recipe: dovetail recipes lists them.", form="NAME", argument=True)],
    *,
    out: Annotated[str | Path | None, OutFile("The file to write (default: NAME.py).", short="-o")] = None,
    force: Annotated[bool, Option("Replace an existing file.")] = False,
) -> CopiedRecipe:
    """Write a recipe to `out` (default: NAME.py in the working directory). An existing file is replaced if `force`."""
    path = Path(f"{name}.py" if out is None else out)
    write_new(path, find_recipe(name).path.read_text(encoding="utf-8"), force)
    return CopiedRecipe(name, path)
