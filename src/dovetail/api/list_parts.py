"""List the parts, yours included: kind, group, summary, and fields with type and default.

dovetail parts --group position
dovetail parts moe
"""

from __future__ import annotations

import dataclasses as dc
import itertools
import json
from typing import Annotated, Any

from dovetail.api.result import ListResult
from dovetail.base.errors import SpecError, names_or_nearest
from dovetail.base.option import Option
from dovetail.spec.part import KINDS
from dovetail.spec.part_info import PartInfo, part_info
from dovetail.views.blocks import Cell, TextTable, View, styled


@dc.dataclass(frozen=True, repr=False)
class PartList(ListResult[PartInfo]):
    """The registered parts, group by group."""

    parts: tuple[PartInfo, ...]

    def to_dict(self) -> dict[str, Any]:
        return {"parts": [part.to_dict() for part in self.parts]}

    def view(self, width: int) -> View:
        if len(self.parts) == 1:
            return _one(self.parts[0])
        rows: list[tuple[Cell, ...]] = []
        for group, parts in itertools.groupby(self.parts, lambda part: part.group):
            members = list(parts)
            rows += [()] * bool(rows) + [(styled((group, "bold cyan"), (f" {len(members)}", "dim")),)]
            for part in members:
                fields = ", ".join(f"{field.name}={_short(field.default)}" for field in part.fields)
                rows.append((styled((f"  {part.kind}", "green")), part.summary, styled((fields, "dim"))))
        return TextTable(
            ("kind", "summary", "fields"), rows, header=False, widths=(2 + max(len(one.kind) for one in self.parts),)
        )


def _one(part: PartInfo) -> View:
    """The part by itself: a line per field with its type and default."""
    rows = [(field.name, field.type, _short(field.default)) for field in part.fields]
    head = styled((part.kind, "bold green"), (f"  {part.group}", "dim"), f"\n{part.summary}")
    return [head, "", TextTable(("field", "type", "default"), rows, header=False)] if rows else head


def _short(value: Any) -> str:
    """Return plain data without the quotes of JSON."""
    return json.dumps(value).replace('"', "")


def list_parts(
    group: Annotated[str | None, Option("Only the parts of one group: mask, norm, position …")] = None,
    kind: Annotated[
        str | None, Option("Only this part, with a line per field: moe, rope …", form="KIND", argument=True)
    ] = None,
) -> PartList:
    """Return every registered part, yours included, those of one group (`mask`, `norm`, `position` …), or the one of a kind."""
    from dovetail import parts as _registered  # noqa: F401  # pyright: ignore[reportUnusedImport]  registers every kind
    from dovetail.nn.groups import GROUPS

    names = [one.group for one in GROUPS]
    if group is not None and group not in names:
        raise SpecError("--group", f"{group!r} is not a group of parts", names_or_nearest(group, names, "groups"))
    if kind is not None and (kind not in KINDS or KINDS[kind].group not in names):
        raise SpecError("kind", f"no part is called {kind!r}", names_or_nearest(kind, sorted(KINDS), "kinds"))
    kinds = sorted((part for name, part in KINDS.items() if kind in (None, name)), key=lambda part: part.kind)
    chosen = names if group is None else [group]
    return PartList(tuple(part_info(part) for name in chosen for part in kinds if part.group == name))
