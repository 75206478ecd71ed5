"""List the Hugging Face model types that can be imported and exported.

dovetail port
dovetail port --json
"""

from __future__ import annotations

import dataclasses as dc
from typing import TYPE_CHECKING, Any

from dovetail.api.result import ListResult
from dovetail.views.blocks import TextTable, View, styled

if TYPE_CHECKING:
    from dovetail.hf.survey import Family


@dc.dataclass(frozen=True, repr=False)
class FamilyList(ListResult["Family"]):
    """The families, in the order in which an export tries them."""

    families: tuple[Family, ...]

    def to_dict(self) -> dict[str, Any]:
        return {"families": [family.data() for family in self.families]}

    def view(self, width: int) -> View:
        from dovetail.hf.survey import REFERENCE_VERSION

        rows = [
            (
                styled((one.model_type, "bold")),
                "yes",
                "yes",
                ", ".join(one.architectures),
                "" if one.lines is None else str(one.lines),
            )
            for one in self.families
        ]
        table = TextTable(("model_type", "read", "written", "architectures", "lines"), rows, right=("lines",))
        compared = sum(family.transformers is not None for family in self.families)
        below = f"{len(self)} families, {compared} of them compared with transformers {REFERENCE_VERSION} in our tests"
        return [table, "", styled((below, "dim"))]


def list_families() -> FamilyList:
    """Return the families of models that can be read from Hugging Face layout and written in it."""
    from dovetail.hf.survey import survey

    return FamilyList(tuple(survey()))
