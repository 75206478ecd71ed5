"""Two specs compared: the status of each tensor as a table on a terminal, where equal layers share a line; and a page, with the
models side by side, part by part, then the fields that differ and the status of each tensor."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

from rich.console import Group
from rich.table import Table
from rich.text import Text

from dovetail.account import Account, TreeNode, account, usual_length
from dovetail.base.units import count, flops, size
from dovetail.views.console import plain_table
from dovetail.views.page import Fact, body
from dovetail.views.summary import description
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
OPEN = ("impossible", "dropped", "new", "transformed")  # statuses whose tables are unfolded at first


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


class PartPair(NamedTuple):
    """A part of a, the part of b at the same path, and how many neighboring layers are this pair."""

    label: str
    a: TreeNode | None
    b: TreeNode | None
    times: int = 1

    @property
    def node(self) -> TreeNode:
        """The part that both have, or that one has."""
        node = self.b or self.a
        assert node is not None
        return node

    @property
    def form(self) -> tuple[object, object]:
        """Everything but the paths."""
        return (self.a and self.a.form, self.b and self.b.form)

    @property
    def same(self) -> bool:
        """Whether both parts and all parts below them are equal."""
        return self.a is not None and self.b is not None and self.form[0] == self.form[1]

    @property
    def own_same(self) -> bool:
        """Whether the parts are equal, apart from the parts below them."""
        return self.a is not None and self.b is not None and _own(self.a) == _own(self.b)

    @property
    def status(self) -> str:
        """What became of a part that is not the same."""
        return "new" if self.a is None else "dropped" if self.b is None else "changed"

    @property
    def words(self) -> tuple[str, ...]:
        """Both parts with their fields, and with their shapes where the fields do not tell them apart."""
        words = [[] if node is None else [node.kind, *description(node)] for node in (self.a, self.b)]
        if words[0] == words[1]:
            words = [[*words[i], *_shapes(node)] for i, node in enumerate((self.a, self.b))]
        return tuple(" · ".join(side) or "none" for side in words)

    @property
    def parameters(self) -> str:
        """The number of parameters of both."""
        a, b = (0 if node is None else node.parameters * self.times for node in (self.a, self.b))
        return "" if not a and not b else f"{count(a)} parameters" if a == b else f"{count(a)} → {count(b)} parameters"

    @property
    def children(self) -> list[PartPair]:
        """The parts below a pair by name, in the order of a and then of b; equal neighboring layers are one."""
        below = [{} if node is None else {_name(child, node): child for child in node.children} for node in (self.a, self.b)]
        pairs = [PartPair(name, below[0].get(name), below[1].get(name)) for name in _merged(list(below[0]), list(below[1]))]
        folded: list[PartPair] = []
        for _, group in groupby(pairs, lambda one: (one.label.rpartition(" ")[0] or one.label, one.form)):
            run = list(group)
            label = run[0].label if len(run) == 1 else f"{run[0].label}–{run[-1].label.rpartition(' ')[2]} ×{len(run)}"
            folded.append(run[0]._replace(label=label, times=self.times * len(run)))
        return folded


def diff_body(result: Diff, names: tuple[str, str]) -> str:
    """Return the content of the page."""
    length = min(usual_length(result.a), usual_length(result.b))
    costs = account(result.a, length), account(result.b, length)
    return body(
        "diff.html",
        names=names,
        summary={status: result.summary[status] for status in STYLES},
        figures=_facts(*costs),
        fields=field_groups(result),
        root=PartPair("model", costs[0].tree, costs[1].tree),
        tensors={status: tensor_groups(result, status) for status in STYLES},
        open_statuses=OPEN,
        description=description,
        shape_text=shape_text,
    )


def _facts(a: Account, b: Account) -> Iterator[Fact]:
    at = f"per token at length {a.length:,}"
    work = a.flops_per_token, b.flops_per_token
    yield _fact("parameters", f"{a.tree.parameters:,}", f"{b.tree.parameters:,}", "")
    yield _fact("matmul", flops(work[0]["matmul"]), flops(work[1]["matmul"]), "per token")
    yield _fact("attention", flops(work[0]["attention_causal"]), flops(work[1]["attention_causal"]), at)
    states = size(a.state_bytes(a.length)), size(b.state_bytes(b.length))
    yield _fact("decode state", *states, f"per sequence of {a.length:,} tokens in {a.dtype}")


def _fact(name: str, a: str, b: str, note: str) -> Fact:
    return Fact(name, a if a == b else f"{a} → {b}", note)


def _shapes(node: TreeNode | None) -> list[str]:
    return [] if node is None else [f"{name} {shape_text(shape)}" for name, shape in node.shapes.items()]


def _merged(a: list[str], b: list[str]) -> list[str]:
    """Return the names of both lists: each name of b that a lacks follows the name that it follows in b."""
    names = list(a)
    for i, name in enumerate(b):
        if name not in names:
            names.insert(names.index(b[i - 1]) + 1 if i else 0, name)
    return names


def _name(child: TreeNode, parent: TreeNode) -> str:
    """Return `mixer`, or `layers 3` for a layer."""
    return child.path.removeprefix(parent.path).lstrip(".").replace(".", " ")


def _own(node: TreeNode) -> tuple[object, ...]:
    return node.kind, repr(node.about), repr(node.shapes), repr(node.same_as)
