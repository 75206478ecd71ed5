"""List the parts, yours included: kind, group, summary, and fields with type and default.

dovetail parts --group position
dovetail parts moe
"""

from __future__ import annotations

import dataclasses as dc
from typing import Annotated

import tyro

from dovetail.cli.flags import LoadFlags
from dovetail.cli.output import print_json
from dovetail.cli.printing import print_view


@dc.dataclass
class Command(LoadFlags):
    """The parts to list."""

    kind: tyro.conf.Positional[Annotated[str | None, tyro.conf.arg(metavar="KIND")]] = None
    """Only this part, with a line per field: moe, rope …"""
    group: str | None = None
    """Only the parts of one group: mask, norm, position …"""
    json: bool = False
    """Print a JSON list."""

    def run(self) -> int:
        """Print the list."""
        from dovetail.api.list_parts import list_parts

        result = list_parts(self.group, self.kind)
        if self.json:
            print_json([part.to_dict() for part in result])
        else:
            print_view(result)
        return 0
