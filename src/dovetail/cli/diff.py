"""Show the status of each tensor between two specs: kept, reinterpreted, transformed, new, dropped or impossible.

Weights are compared by path, layers by their number. `dovetail graft` applies the result to a checkpoint.

    dovetail diff mistral-7b llama-3-8b
    dovetail diff llama-tiny llama-tiny --set 'layers.*.mixer.kv_heads=1' --swap position=alibi
"""

from __future__ import annotations

import dataclasses as dc
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Group
from rich.table import Table
from rich.text import Text

from dovetail.cli.output import print_json
from dovetail.cli.shown import shown, write_page

if TYPE_CHECKING:
    from dovetail.surgery import Diff, Row, Status

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


@dc.dataclass
class Command:
    """The two models to compare."""

    a: tyro.conf.Positional[str]
    """A preset's name, a .yaml file or a model directory."""
    b: tyro.conf.Positional[str]
    """Another one."""
    set: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Change a field of B: --set layers.*.mixer.kv_heads=1; may be given many times."""
    swap: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Change a part of B in every layer: --swap position=alibi; may be given many times, applied before --set."""
    json: bool = False
    """Print one JSON object."""
    html: Path | None = None
    """Also write the view as an HTML page."""

    def run(self) -> int:
        """Compare the specs and print the result."""
        from dovetail.io.spec import changed
        from dovetail.port.load import find_spec
        from dovetail.surgery import diff

        result = diff(find_spec(self.a), changed(find_spec(self.b), self.set, self.swap))
        if self.html is not None:
            write_page(self.html, f"dovetail diff {self.a} {self.b}", lambda _: view(self.a, self.b, result))
        if self.json:
            print_json(result.to_data())
        else:
            shown(lambda _: view(self.a, self.b, result))
        return 0


def view(a: str, b: str, result: Diff) -> Group:
    """Return the view: a summary, the fields that differ, then the tensors of each status, equal layers folded."""
    title = Text.assemble((a, "bold"), " → ", (b, "bold"), "   ")
    counts = [Text.assemble((str(result.summary[status]), f"bold {style}"), f" {status}") for status, style in STYLES.items()]
    title.append_text(Text("   ").join(counts))
    lines: list[Text | Table] = [title]
    if result.change:
        lines += [Text(), field_table(result)]
    for status, style in STYLES.items():
        rows = [row for row in result.tensors if row.status == status]
        if rows:
            heading = Text.assemble((status, f"bold {style}"), (f"  {len(rows)}", "dim"))
            lines += [Text(), heading, tensor_table(rows, result)]
    return Group(*lines)


def field_table(result: Diff) -> Table:
    """The fields that differ; equal changes of several layers share a line."""
    from dovetail.account import say

    groups: dict[tuple[str, str, str], list[str]] = {}
    for change in result.change:
        groups.setdefault((LAYER_NUMBER.sub("*", change.path), say(change.a), say(change.b)), []).append(change.path)
    table = _columns(3)
    for (_, old, new), paths in groups.items():
        table.add_row(Text(_folded(paths, result)), Text(old, "dim"), Text(f"→ {new}"))
    return table


def tensor_table(rows: list[Row], result: Diff) -> Table:
    """Rows of one status; equal rows of several layers share a line."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        key = tuple(LAYER_NUMBER.sub("*", text or "") for text in (row.a, row.b, row.how))
        groups.setdefault((*key, str(row.shapes)), []).append(row)
    table = _columns(4)
    for (_, _, folded, _), group in groups.items():
        how = folded if len(group) > 1 else group[0].how
        before, after = (_folded([p for row in group if (p := getattr(row, side))], result) for side in ("a", "b"))
        names = before if before == after or not after else after if not before else f"{before} → {after}"
        shapes = list(dict.fromkeys(str(shape).replace(",)", ")") for shape in group[0].shapes.values()))
        count = f"×{len(group)}" if len(group) > 1 else ""
        table.add_row(Text(f"  {names}"), Text(count, "dim"), Text(" → ".join(shapes), "dim"), Text(how))
    return table


def _columns(count: int) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    for _ in range(count):
        table.add_column(overflow="fold")
    return table


def _folded(paths: Iterable[str], result: Diff) -> str:
    """One name for paths that differ in their layer number alone: layers.* for all layers, layers.4–5 for some."""
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
