"""List the families of models that can be read from Hugging Face's layout and written in it.

dovetail port
dovetail port --json
"""

from __future__ import annotations

import dataclasses as dc

from rich.console import Group
from rich.table import Table
from rich.text import Text

from dovetail.cli.output import print_json
from dovetail.cli.shown import shown


@dc.dataclass
class Command:
    """Output format."""

    json: bool = False
    """One JSON array on stdout."""

    def run(self) -> int | None:
        """Print one row per family."""
        from dovetail.port.survey import REFERENCE_VERSION, survey

        rows = survey()
        if self.json:
            print_json([row.data() for row in rows])
            return 0
        table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 3, 0, 0))
        for name in ("model_type", "read", "written", "architectures"):
            table.add_column(name)
        table.add_column("lines", justify="right", style="dim")
        for row in rows:
            table.add_row(
                f"[bold]{row.model_type}[/]",
                "yes",
                "yes",
                ", ".join(row.architectures),
                "" if row.lines is None else str(row.lines),
            )
        version, compared = REFERENCE_VERSION, sum(row.transformers is not None for row in rows)
        below = Text(f"\n{len(rows)} families, {compared} of them compared with transformers {version} in our tests", "dim")
        shown(lambda _: Group(table, below))
        return 0
