"""Show what a model is and what it costs: its parts, parameters, FLOPs per token, decode state, and advice.

Nothing is built: a model of 405 billion parameters answers as fast as a small one. The length is 2048 tokens unless told
otherwise, or fewer where the model takes no more (a table of learned positions, the squares of an image).

    dovetail show llama-3-70b --length 4096
    dovetail show llama-tiny --set 'layers.*.mixer.kv_heads=1' --swap position=alibi --html llama-tiny.html
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.console import Group
from rich.table import Table
from rich.text import Text

from dovetail.cli.output import print_json
from dovetail.cli.shown import shown, write_page
from dovetail.look.bar import bar

if TYPE_CHECKING:
    from dovetail.account import Account, Node

BAR = 8  # characters of a full share
NARROW = 100  # where a terminal has fewer columns some of ours are left out
LENGTHS = (1024, 4096, 16384, 65536, 131072)


@dc.dataclass
class Command:
    """Which model, at which length, in which numbers."""

    spec: tyro.conf.Positional[str]
    """A preset's name, a .yaml file or a model directory."""
    length: int | None = None
    """Tokens of a sequence; 2048 by default, or fewer where the model takes no more."""
    dtype: Literal["fp64", "fp32", "bf16", "fp16", "fp8"] = "bf16"
    """Data type of weights and decode state."""
    set: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Change a field first: --set layers.*.mixer.kv_heads=1; may be given many times."""
    swap: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Change a part wherever it stands: --swap position=alibi; may be given many times, and comes before --set."""
    json: bool = False
    """One JSON object on stdout."""
    html: Path | None = None
    """Write what is shown as a page, too."""

    def run(self) -> int:
        """Print the account."""
        from dovetail.account import account
        from dovetail.core.errors import SpecError
        from dovetail.io.spec import changed, swap_losses
        from dovetail.port.load import find_spec

        if self.length is not None and not 1 <= self.length <= 2**24:
            raise SpecError("--length", f"{self.length} is not a number of tokens from 1 to {2**24}")
        before = find_spec(self.spec)
        spec, lost = changed(before, self.set, self.swap), swap_losses(before, self.swap)
        made = account(spec, self.length, self.dtype)
        if self.html is not None:
            write_page(self.html, f"dovetail show {self.spec}", lambda width: view(self.spec, made, width, lost))
        if self.json:
            print_json({"spec": self.spec, **made.to_data(), **({"not_carried_over": lost} if lost else {})})
        else:
            shown(lambda width: view(self.spec, made, width, lost))
        return 0


def view(name: str, made: Account, width: int, lost: Sequence[str] = ()) -> Group:
    """The account for people."""
    whole = made.tree.parameters
    title = Text.assemble((name, "bold"), "   ", (f"{whole:,}", "bold cyan"), " parameters")
    dropped = [Text.assemble(("not carried over  ", "yellow"), line) for line in lost]
    return Group(title, "", parts(made.tree, width), "", costs(made), *advice(made), *(["", *dropped] if dropped else []))


def parts(tree: Node, width: int) -> Table:
    """The module tree, equal layers folded. Where the terminal is narrow, what is said of a part takes several lines."""
    from dovetail.account import say

    wide = width >= NARROW
    rows: list[tuple[Text, Text, list[str], list[Text]]] = []  # first column, that of further lines, what is said, the rest
    for guide, label, node, times in lines(tree):
        each, total = node.parameters, node.parameters * times
        share = total / max(tree.parameters, 1)
        said = [f"{name} {say(value)}" for name, value in node.about.items()]
        said += [f"{name} = {other}" for name, other in node.same_as.items()]
        numbers = [Text(short(each) if times > 1 and each else ""), Text(short(total) if total else "")]
        shown = Text.assemble((bar(share, BAR).ljust(BAR) if wide else "", "cyan"), f" {share:6.1%}") if total else Text()
        below = Text(_trunk(guide) + ("│" if node.children else ""), "dim")
        cells = [Text(node.kind, "green"), *numbers[0 if wide else 1 :], shown]
        rows.append((Text.assemble((guide, "dim"), label), below, said, cells))
    fixed = [max(cell.cell_len for cell in column) + 2 for column in zip(*([r[0], *r[3]] for r in rows), strict=True)]
    table = columns("part", "kind", "", *(["each"] if wide else []), "in all", "share", header=True)
    for first, below, said, cells in rows:
        head, *rest = filled(said, max(width - sum(fixed) - 2, 16))
        table.add_row(first, cells[0], Text(head, "dim"), *cells[1:])
        for line in rest:
            table.add_row(below, "", Text(line, "dim"))
    return table


def filled(words: list[str], width: int) -> list[str]:
    """The words joined by dots, on as many lines as they need; at least one."""
    made = [""]
    for word in words:
        if made[-1] and len(made[-1]) + len(word) + 3 > width:
            made.append("")
        made[-1] += f" · {word}" if made[-1] else word
    return made


def columns(*names: str, header: bool = False) -> Table:
    """A table without lines; what is counted stands to the right."""
    table = Table(box=None, pad_edge=False, show_header=header, header_style="dim", padding=(0, 2, 0, 0))
    for name in names:
        table.add_column(name, justify="right" if name in ("each", "in all", "amount") else "left")
    return table


def lines(node: Node, times: int = 1, label: str = "model", guide: str = "") -> Iterator[tuple[str, str, Node, int]]:
    """(guide, label, node, how often it comes), parents first."""
    from dovetail.account import runs

    yield guide, label, node, times
    rows = [
        (_numbered(below, len(period), repeats), below, times * repeats)
        for period, repeats in runs(node.children)
        for below in period
    ]
    for i, (name, below, count) in enumerate(rows):
        yield from lines(below, count, name, _trunk(guide) + ("└─ " if i == len(rows) - 1 else "├─ "))


def _trunk(guide: str) -> str:
    """What the lines under a line begin with."""
    return guide.replace("├─ ", "│  ").replace("└─ ", "   ")


def _numbered(node: Node, period: int, times: int) -> str:
    """`mixer`; `layers 0–5 ×6`; `layers 1, 3 … 25 ×13` for one of a pattern."""
    above, _, leaf = node.path.rpartition(".")
    if not leaf.isdigit():
        return leaf
    name, first, last = above.rpartition(".")[2], int(leaf), int(leaf) + period * (times - 1)
    if times == 1:
        return f"{name} {first}"
    between = "–" if period == 1 else ", " if times == 2 else f", {first + period} … "
    return f"{name} {first}{between}{last} ×{times}"


def costs(made: Account) -> Table:
    """What a token costs and what decoding remembers."""
    from dovetail.account import BYTES, longest_length
    from dovetail.core.fold import active_parameters

    flops, whole, active = made.flops_per_token, made.tree.parameters, active_parameters(made.spec)
    table = columns("what", "amount", "of what")

    def add(what: str, amount: str, remark: str, style: str = "") -> None:
        table.add_row(Text(what, "dim"), Text(amount, "cyan"), Text(remark, "dim"), style=style)

    add("weights", size(whole * BYTES[made.dtype]), made.dtype)
    if active != whole:
        add("active parameters", short(active), "that one token meets")
    add("matmul", flop(flops["matmul"]), "a token")
    add("attention", flop(flops["attention"]), f"a token at length {made.length:,}, all pairs")
    add("", flop(flops["attention_causal"]), "the pairs that masks let through")
    if not made.remembered:
        add("decode state", "none", "tokens see later tokens, so the model cannot decode token by token")
        return table
    longest = longest_length(made.spec)
    source = " and a source as long" if any(state.per == "source" for state, _ in made.remembered) else ""
    fixed = made.state_bytes(0)
    each = made.state_bytes(1) - fixed
    add("decode state", size(each), f"per token{source} in {made.dtype}, while no window is full")
    if fixed:
        add("", size(fixed), "a sequence, however long it is")
    for n in sorted({n for n in LENGTHS if longest is None or n <= longest} | {made.length}):
        add("", size(made.state_bytes(n)), f"a sequence of {n:,}{source}", "bold" if n == made.length else "")
    return table


def advice(made: Account) -> list[Any]:
    """Return the advice of the parts, as lines; advice is never an error."""
    from dovetail.core import check

    said = check.advice(made.spec, made.length)
    if not said:
        return []
    table = columns("advice", "where", "what")
    for path, problem in said:
        remedy = f" ({problem.remedy})" if problem.remedy else ""
        table.add_row(Text("advice", "yellow"), Text(path, "dim"), Text(problem.problem + remedy))
    return ["", table]


def short(number: float) -> str:
    """A count in three figures: 1.34 B."""
    return _scaled(number, "TBMk")


def flop(number: float) -> str:
    """The same for work: 1.34 GFLOP."""
    return f"{_scaled(number, 'TGMk')}FLOP"


def _scaled(number: float, letters: str) -> str:
    for power, letter in zip((12, 9, 6, 3), letters, strict=True):
        if number >= 10**power:
            return f"{number / 10**power:.2f} {letter}"
    return f"{number:.0f} "


def size(count: int) -> str:
    """Bytes in powers of 1024."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count >= 2**power:
            return f"{count / 2**power:.2f} {unit}"
    return f"{count} B"
