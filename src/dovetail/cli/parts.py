"""List every part there is, yours included: its kind, its group, what it does, its fields with type and default.

dovetail parts --group position
"""

from __future__ import annotations

import dataclasses as dc
import json
import types
import typing
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from dovetail.cli.output import print_json
from dovetail.cli.shown import shown

if TYPE_CHECKING:
    from dovetail.core.part import Part


@dc.dataclass
class Command:
    """Which parts."""

    group: str | None = None
    """Only the parts of one group: mask, norm, position …"""
    json: bool = False
    """A JSON list on stdout."""

    def run(self) -> int:
        """Print the list."""
        from dovetail.core.errors import SpecError
        from dovetail.core.group import GROUPS

        names = [group.group for group in GROUPS]
        if self.group is not None and self.group not in names:
            raise SpecError("--group", f"{self.group!r} is no group of parts", f"groups: {', '.join(names)}")
        found = catalogue(names if self.group is None else [self.group])
        if self.json:
            print_json(found)
            return 0
        shown(lambda _: view(found))
        return 0


def catalogue(groups: list[str]) -> list[dict[str, Any]]:
    """Every registered part of the groups, as plain data, group by group."""
    from dovetail.core.part import KINDS
    from dovetail.io import spec as _every_part_is_registered  # noqa: F401

    kinds = sorted(KINDS.values(), key=lambda part: part.kind)
    return [described(part) for group in groups for part in kinds if part.group == group]


def described(part: type[Part]) -> dict[str, Any]:
    """One part as plain data."""
    from dovetail.core.part import default_of, field_types, plain

    hints = field_types(part)
    fields = [{"name": f.name, "type": written(hints[f.name]), "default": plain(default_of(f))} for f in dc.fields(part)]
    return {"kind": part.kind, "group": part.group, "summary": (part.__doc__ or "").splitlines()[0], "fields": fields}


def written(hint: Any) -> str:
    """A declared type in the words of a spec: int | null, half|adjacent, mask."""
    from dovetail.core.part import Part

    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(map(written, args))
    if origin is typing.Literal:
        return "|".join(map(str, args))
    if origin is tuple:
        return f"list of {written(args[0])}"
    if hint is type(None):
        return "null"
    return hint.group if issubclass(hint, Part) else hint.__name__


def view(found: list[dict[str, Any]]) -> Table:
    """The list for people, group by group."""
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column("kind", no_wrap=True, style="green")
    table.add_column("summary", ratio=1)
    table.add_column("fields", ratio=1, style="dim")
    group = ""
    for part in found:
        if part["group"] != group:
            count = sum(other["group"] == part["group"] for other in found)
            if group:
                table.add_row()
            group = part["group"]
            table.add_row(Text.assemble((group, "bold cyan"), (f" {count}", "dim")))
        fields = [f"{f['name']}={json.dumps(f['default'])}".replace('"', "") for f in part["fields"]]
        table.add_row(f"  {part['kind']}", Text(part["summary"]), Text(", ".join(fields)))
    return table
