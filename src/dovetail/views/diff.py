"""The status of each tensor between two specs, as a table on a terminal: equal layers share a line."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table
from rich.text import Text

from dovetail.views.console import plain_table
from dovetail.weights.surgery import Diff, Status
from dovetail.weights.surgery.groups import field_groups, tensor_groups

# in the order of the view: lost tensors first, kept ones last
STYLES: dict[Status, str] = {
    "impossible": "red",
    "dropped": "magenta",
    "new": "blue",
    "transformed": "cyan",
    "reinterpreted": "yellow",
    "kept": "green",
}


def diff_view(result: Diff, names: tuple[str, str]) -> Group:
    """Return the view: a summary, the fields that differ, then the tensors of each status."""
    title = Text.assemble((names[0], "bold"), " → ", (names[1], "bold"))
    counts = [Text.assemble((str(result.summary[status]), f"bold {style}"), f" {status}") for status, style in STYLES.items()]
    lines: list[Text | Table] = [title, Text("   ").join(counts)]
    if result.change:
        lines += [Text(), _field_table(result)]
    for status, style in STYLES.items():
        number = result.summary[status]
        if number:
            heading = Text.assemble((status, f"bold {style}"), (f"  {number}", "dim"))
            lines += [Text(), heading, _tensor_table(result, status)]
    return Group(*lines)


def shape_text(shape: tuple[int, ...]) -> str:
    """Return `(704, 256)`, and `(256)` for one dimension."""
    return f"({', '.join(map(str, shape))})"


def _field_table(result: Diff) -> Table:
    table = plain_table("path", "a", "b")
    for paths, old, new in field_groups(result):
        table.add_row(Text(paths), Text(old, "dim"), Text(f"→ {new}"))
    return table


def _tensor_table(result: Diff, status: Status) -> Table:
    table = plain_table("names", "count", "shapes", "how")
    for a, b, number, shapes, how in tensor_groups(result, status):
        names = a if a == b or not b else b if not a else f"{a} → {b}"
        texts = dict.fromkeys(shape_text(shape) for shape in shapes.values())
        times = Text(f"×{number}" if number > 1 else "", "dim")
        table.add_row(Text(f"  {names}"), times, Text(" → ".join(texts), "dim"), Text(how))
    return table
