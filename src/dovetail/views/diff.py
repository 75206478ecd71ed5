"""The status of each tensor between two specs, as a table on a terminal: equal layers share a line."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from rich.console import Group
from rich.table import Table
from rich.text import Text

from dovetail.account import format_value
from dovetail.views.console import plain_table
from dovetail.weights.surgery import Diff, Row, Status

# in the order of the view: lost tensors first, kept ones last
STYLES: dict[Status, str] = {
    "impossible": "red",
    "dropped": "magenta",
    "new": "blue",
    "transformed": "cyan",
    "reinterpreted": "yellow",
    "kept": "green",
}
LAYER_NUMBER = re.compile(r"(?<=layers\.)\d+")


class FieldGroup(NamedTuple):
    """A change of one field, in one or several layers."""

    paths: str
    a: str
    b: str


class TensorGroup(NamedTuple):
    """Equal rows of one or several layers."""

    a: str
    b: str
    times: int
    shapes: dict[str, tuple[int, ...]]
    how: str


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


def field_groups(result: Diff) -> list[FieldGroup]:
    """Return the fields that differ; equal changes of several layers are one."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for change in result.change:
        key = (LAYER_NUMBER.sub("*", change.path), format_value(change.a), format_value(change.b))
        groups.setdefault(key, []).append(change.path)
    return [FieldGroup(_folded(paths, result), old, new) for (_, old, new), paths in groups.items()]


def tensor_groups(result: Diff, status: Status) -> list[TensorGroup]:
    """Return the rows of one status; equal rows of several layers are one."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in result.tensors:
        if row.status == status:
            key = tuple(LAYER_NUMBER.sub("*", text or "") for text in (row.a, row.b, row.how))
            groups.setdefault((*key, str(row.shapes)), []).append(row)
    found: list[TensorGroup] = []
    for (_, _, folded, _), rows in groups.items():
        before = _folded((row.a for row in rows if row.a is not None), result)
        after = _folded((row.b for row in rows if row.b is not None), result)
        how = folded if len(rows) > 1 else rows[0].how
        found.append(TensorGroup(before, after, len(rows), rows[0].shapes, how))
    return found


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


def _folded(paths: Iterable[str], result: Diff) -> str:
    """Return one name for paths that differ in their layer number alone: layers.* for all layers, layers.4–5 for some."""
    paths = list(dict.fromkeys(paths))
    if len(paths) < 2:
        return "".join(paths)
    numbers = sorted({int(number.group()) for path in paths if (number := LAYER_NUMBER.search(path))})
    stack = LAYER_NUMBER.split(paths[0])[0]
    of_stack = [path for row in result.tensors for path in (row.a, row.b) if path and path.startswith(stack)]
    if set(numbers) == {int(number.group()) for path in of_stack if (number := LAYER_NUMBER.search(path))}:
        return LAYER_NUMBER.sub("*", paths[0])
    contiguous = numbers == list(range(numbers[0], numbers[-1] + 1))
    return LAYER_NUMBER.sub(f"{numbers[0]}–{numbers[-1]}" if contiguous else ",".join(map(str, numbers)), paths[0])
