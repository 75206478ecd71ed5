"""Say what becomes of each tensor between two specs: kept, read differently, transformed, new, dropped, or impossible.

Weights are compared by path, layers by their number. `dovetail.surgery.apply` carries a checkpoint over as it is said here.

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
    from dovetail.surgery import Diff, Fate, Row

# the order of the view: what is lost first, what stays as it is last
STYLES: dict[Fate, tuple[str, str]] = {
    "impossible": ("impossible", "red"),
    "dropped": ("dropped", "magenta"),
    "new": ("new", "blue"),
    "transformed": ("transformed", "cyan"),
    "kept_reader_changed": ("kept, read differently", "yellow"),
    "kept": ("kept", "green"),
}
NUMBER = re.compile(r"(?<=layers\.)\d+")


@dc.dataclass
class Command:
    """Which two models."""

    a: tyro.conf.Positional[str]
    """A preset's name, a .yaml file or a model directory."""
    b: tyro.conf.Positional[str]
    """Another."""
    set: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Change a field of B first: --set layers.*.mixer.kv_heads=1; may be given many times."""
    swap: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Change a part of B wherever it stands: --swap position=alibi; may be given many times, and comes before --set."""
    json: bool = False
    """One JSON object on stdout."""
    html: Path | None = None
    """Write what is shown as a page, too."""

    def run(self) -> int:
        """Print the fates."""
        from dovetail.io.spec import changed
        from dovetail.port.load import find_spec
        from dovetail.surgery import diff

        found = diff(find_spec(self.a), changed(find_spec(self.b), self.set, self.swap))
        if self.html is not None:
            write_page(self.html, f"dovetail diff {self.a} {self.b}", lambda _: view(self.a, self.b, found))
        if self.json:
            print_json(found.to_data())
        else:
            shown(lambda _: view(self.a, self.b, found))
        return 0


def view(a: str, b: str, found: Diff) -> Group:
    """The fates for people: a summary, what differs, then rows with equal layers folded."""
    title = Text.assemble((a, "bold"), " → ", (b, "bold"), "   ")
    title.append_text(
        Text("   ").join(
            Text.assemble((str(found.summary[fate]), f"bold {style}"), f" {name}") for fate, (name, style) in STYLES.items()
        )
    )
    shown: list[Text | Table] = [title]
    if found.change:
        shown += [Text(), differing(found)]
    for fate, (name, style) in STYLES.items():
        rows = [row for row in found.tensors if row.fate == fate]
        if rows:
            shown += [Text(), Text.assemble((name, f"bold {style}"), (f"  {len(rows)}", "dim")), fates(rows, found)]
    return Group(*shown)


def differing(found: Diff) -> Table:
    """The fields that differ."""
    from dovetail.account import say

    said: dict[tuple[str, str, str], list[str]] = {}
    for change in found.change:
        said.setdefault((NUMBER.sub("*", change.path), say(change.a), say(change.b)), []).append(change.path)
    table = _columns(3)
    for (_, old, new), paths in said.items():
        table.add_row(Text(_folded(paths, found)), Text(old, "dim"), Text(f"→ {new}"))
    return table


def fates(rows: list[Row], found: Diff) -> Table:
    """Rows of one fate, those alike in all layers as one."""
    alike: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        key = tuple(NUMBER.sub("*", text or "") for text in (row.a, row.b, row.how))
        alike.setdefault((*key, str(row.shapes)), []).append(row)
    table = _columns(4)
    for (_, _, folded, _), same in alike.items():
        how = folded if len(same) > 1 else same[0].how
        before, after = (_folded([p for row in same if (p := getattr(row, side))], found) for side in ("a", "b"))
        names = before if before == after or not after else after if not before else f"{before} → {after}"
        shapes = list(dict.fromkeys(str(shape).replace(",)", ")") for shape in same[0].shapes.values()))
        count = f"×{len(same)}" if len(same) > 1 else ""
        table.add_row(Text(f"  {names}"), Text(count, "dim"), Text(" → ".join(shapes), "dim"), Text(how))
    return table


def _columns(count: int) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    for _ in range(count):
        table.add_column(overflow="fold")
    return table


def _folded(paths: Iterable[str], found: Diff) -> str:
    """One name for paths that differ by the number of their layer: layers.* for all of them, layers.4–5 for some."""
    paths = list(dict.fromkeys(paths))
    if len(paths) < 2:
        return "".join(paths)
    numbers = sorted({int(number.group()) for path in paths if (number := NUMBER.search(path))})
    stack = NUMBER.split(paths[0])[0]
    every = {
        int(m.group()) for row in found.tensors for p in (row.a, row.b) if p and p.startswith(stack) and (m := NUMBER.search(p))
    }
    if set(numbers) == every:
        return NUMBER.sub("*", paths[0])
    unbroken = numbers == list(range(numbers[0], numbers[-1] + 1))
    return NUMBER.sub(f"{numbers[0]}–{numbers[-1]}" if unbroken else ",".join(map(str, numbers)), paths[0])
