"""The summary of a model on a terminal: its parts with their parameters, its costs, and advice.

Repeated layers are folded to one line: `layers 0–5 ×6`, or `layers 1, 3 … 25 ×13` for one layer of a pattern.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from rich.console import Group
from rich.table import Table
from rich.text import Text

from dovetail.account import BYTES, Account, TreeNode, format_value, runs
from dovetail.base.units import count, flops, size
from dovetail.spec.check import advice
from dovetail.spec.fold import active_parameters
from dovetail.views.bar import bar
from dovetail.views.console import plain_table

BAR = 8  # characters of a full bar
NARROW = 100  # columns below which the table leaves some out
LENGTHS = (1024, 4096, 16384, 65536, 131072)  # at which the decode state is shown


class Limit(NamedTuple):
    """The longest sequence that a model takes, and what sets it."""

    tokens: int
    reason: str


class TreeLine(NamedTuple):
    """One line of the folded module tree."""

    guide: str  # the lines of the tree left of the label
    label: str
    node: TreeNode
    times: int  # how often the node occurs


class Amount(NamedTuple):
    """One line of the costs."""

    name: str
    amount: str
    note: str
    emphasized: bool = False


def summary_view(name: str, account: Account, limit: Limit | None, width: int, lost: Sequence[str] = ()) -> Group:
    """Return the summary for `width` columns. `lost` are fields that a swap dropped."""
    title = Text.assemble((name, "bold"), "   ", (f"{account.tree.parameters:,}", "bold cyan"), " parameters")
    dropped = [Text.assemble(("not carried over  ", "yellow"), line) for line in lost]
    below = ["", *dropped] if dropped else []
    return Group(title, "", part_table(account.tree, width), "", cost_table(account, limit), *advice_table(account), *below)


def part_table(tree: TreeNode, width: int) -> Table:
    """Return the module tree as a table. In a narrow terminal the description of a part takes several lines."""
    wide = width >= NARROW
    rows: list[tuple[Text, Text, list[str], list[Text]]] = []  # first column, that of further lines, description, the rest
    for guide, label, node, times in fold_lines(tree):
        each, total = node.parameters, node.parameters * times
        fraction = total / max(tree.parameters, 1)
        numbers = [Text(count(each) if times > 1 and each else ""), Text(count(total) if total else "")]
        share = Text.assemble((bar(fraction, BAR).ljust(BAR) if wide else "", "cyan"), f" {fraction:6.1%}") if total else Text()
        below = Text(_trunk(guide) + ("│" if node.children else ""), "dim")
        cells = [Text(node.kind, "green"), *numbers[0 if wide else 1 :], share]
        rows.append((Text.assemble((guide, "dim"), label), below, description(node), cells))
    fixed = [max(cell.cell_len for cell in column) + 2 for column in zip(*([r[0], *r[3]] for r in rows), strict=True)]
    names = ("part", "kind", "", *(["each"] if wide else []), "in all", "share")
    table = plain_table(*names, right=("each", "in all"), header=True)
    for first, below, words, cells in rows:
        head, *rest = _filled(words, max(width - sum(fixed) - 2, 16))
        table.add_row(first, cells[0], Text(head, "dim"), *cells[1:])
        for line in rest:
            table.add_row(below, "", Text(line, "dim"))
    return table


def description(node: TreeNode) -> list[str]:
    """Return the sizes and fields of a part, each as a few words, and its tied weights."""
    ties = [f"{name} = {owner}" for name, owner in node.same_as.items()]
    return [f"{name} {format_value(value)}" for name, value in node.about.items()] + ties


def fold_lines(node: TreeNode, times: int = 1, label: str = "model", guide: str = "") -> Iterator[TreeLine]:
    """Yield the lines of the module tree, parents first, with repeated layers folded."""
    yield TreeLine(guide, label, node, times)
    rows = [
        (layer_label(below, len(period), repeats), below, times * repeats)
        for period, repeats in runs(node.children)
        for below in period
    ]
    for i, (name, below, number) in enumerate(rows):
        yield from fold_lines(below, number, name, _trunk(guide) + ("└─ " if i == len(rows) - 1 else "├─ "))


def layer_label(node: TreeNode, period: int, times: int) -> str:
    """Return `mixer`; `layers 0–5 ×6`; `layers 1, 3 … 25 ×13` for one layer of a pattern."""
    above, _, leaf = node.path.rpartition(".")
    if not leaf.isdigit():
        return leaf
    name, first, last = above.rpartition(".")[2], int(leaf), int(leaf) + period * (times - 1)
    if times == 1:
        return f"{name} {first}"
    between = "–" if period == 1 else ", " if times == 2 else f", {first + period} … "
    return f"{name} {first}{between}{last} ×{times}"


def cost_table(account: Account, limit: Limit | None) -> Table:
    """Return the costs as a table."""
    table = plain_table("name", "amount", "note", right=("amount",))
    for name, amount, note, emphasized in amounts(account, limit):
        table.add_row(Text(name, "dim"), Text(amount, "cyan"), Text(note, "dim"), style="bold" if emphasized else "")
    return table


def amounts(account: Account, limit: Limit | None) -> Iterator[Amount]:
    """Yield the costs of a model: weights, FLOPs per token, decode state at several lengths."""
    total, active = account.tree.parameters, active_parameters(account.spec)
    yield Amount("weights", size(total * BYTES[account.dtype]), account.dtype)
    if active != total:
        yield Amount("active parameters", count(active), "per token")
    if limit is not None:
        yield Amount("longest sequence", f"{limit.tokens:,}", f"tokens ({limit.reason})")
    work = account.flops_per_token
    yield Amount("matmul", flops(work["matmul"]), "per token")
    yield Amount("attention", flops(work["attention"]), f"per token at length {account.length:,}, all pairs")
    if work["attention_causal"] != work["attention"]:
        yield Amount("", flops(work["attention_causal"]), "per token, over the pairs that masks leave")
    if "mtp" in work:
        yield Amount("multi-token prediction", flops(work["mtp"]), "per token in training, the head at each depth included")
    if not account.states:
        yield Amount("decode state", "none", "tokens depend on later tokens: the model cannot decode token by token")
        return
    yield from _state_amounts(account, limit)


def _state_amounts(account: Account, limit: Limit | None) -> Iterator[Amount]:
    source = " and a source as long" if any(state.per == "source" for state, _ in account.states) else ""
    fixed = account.state_bytes(0)
    per_token = account.state_bytes(1) - fixed
    lengths = sorted({n for n in LENGTHS if limit is None or n <= limit.tokens} | {account.length})
    sizes = {n: account.state_bytes(n) for n in lengths}
    if not per_token and set(sizes.values()) == {fixed}:
        yield Amount("recurrent state", size(fixed), f"per sequence of any length, in {account.dtype}")
        return
    window = ", while no window is full" if any(state.window is not None for state, _ in account.states) else ""
    yield Amount("decode state", size(per_token), f"per token{source} in {account.dtype}{window}")
    if fixed:
        yield Amount("", size(fixed), "per sequence of any length (recurrent state)")
    for n, number in sizes.items():
        yield Amount("", size(number), f"per sequence of {n:,} tokens{source}", n == account.length)


def advice_table(account: Account) -> list[Any]:
    """Return the advice of the parts, as lines; advice is never an error."""
    problems = advice(account.spec, account.length)
    if not problems:
        return []
    table = plain_table("advice", "path", "problem")
    for path, problem in problems:
        remedy = f" ({problem.remedy})" if problem.remedy else ""
        table.add_row(Text("advice", "yellow"), Text(path, "dim"), Text(problem.problem + remedy))
    return ["", table]


def _filled(words: list[str], width: int) -> list[str]:
    """Return the words joined by dots, on as many lines as they need; at least one."""
    lines = [""]
    for word in words:
        if lines[-1] and len(lines[-1]) + len(word) + 3 > width:
            lines.append("")
        lines[-1] += f" · {word}" if lines[-1] else word
    return lines


def _trunk(guide: str) -> str:
    """Return the guide of the lines below a line."""
    return guide.replace("├─ ", "│  ").replace("└─ ", "   ")
