"""SpecDiff: what `diff` returns, two specs compared tensor by tensor."""

from __future__ import annotations

import dataclasses as dc
from typing import Any

from dovetail.api.result import Result
from dovetail.views.blocks import View
from dovetail.views.diff import diff_body, diff_view
from dovetail.views.page import Page
from dovetail.weights.surgery import Diff


@dc.dataclass(frozen=True, repr=False)
class SpecDiff(Result, Diff):
    """Two specs compared: `tensors` with a status each, and the fields that differ (`change`)."""

    names: tuple[str, str] = ("a", "b")

    def to_dict(self) -> dict[str, Any]:
        return Diff.to_dict(self)

    def view(self, width: int) -> View:
        return diff_view(self, self.names)

    def page(self) -> Page:
        return Page(f"dovetail diff {' '.join(self.names)}", diff_body(self, self.names))


def with_names(result: Diff, names: tuple[str, str]) -> SpecDiff:
    """Return the comparison as a result with the names of its two sides."""
    return SpecDiff(result.a, result.b, result.tensors, result.change, names)
