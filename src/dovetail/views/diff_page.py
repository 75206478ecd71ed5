"""The page of `diff`: two models side by side, part by part, then the fields that differ and the status of each tensor."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

from dovetail.account import Account, Node, account, usual_length
from dovetail.core.units import count, flops, size
from dovetail.views.diff import STYLES, TensorGroup, field_groups, shape_text, tensor_groups
from dovetail.views.page import Fact, badge, facts, text
from dovetail.views.summary import description
from dovetail.weights.surgery import Diff, Status

OPEN = ("impossible", "dropped", "new", "transformed")  # statuses whose tables are unfolded at first
RULES = """
.dovetail .pair{border:1px solid var(--line);border-radius:8px;margin:.35rem 0 0;padding:.35rem .6rem;background:var(--inner)}
.dovetail .pair.differs{background:var(--changed)}
.dovetail .head{display:inline-flex;flex-wrap:wrap;align-items:baseline;gap:.1rem .6rem;vertical-align:top}
.dovetail .head{width:calc(100% - 1.2em)}
.dovetail .label{font-weight:600}
.dovetail .kind{color:var(--accent)}
.dovetail .sides{display:grid;grid-template-columns:1fr 1fr;gap:0 1rem;font-size:.92rem}
.dovetail .sides>div{min-width:0}
.dovetail .side-name{color:var(--soft);font-weight:600;margin-right:.4rem}
.dovetail .tensor{border-top:1px solid var(--line);padding:.25rem 0}
.dovetail .status{margin:.5rem 0}
.dovetail .counts{display:flex;flex-wrap:wrap;gap:.4rem}
@media(max-width:600px){.dovetail .sides{grid-template-columns:1fr}}
"""


class Pair(NamedTuple):
    """A part of a, the part of b at the same path, and how many neighboring layers are this pair."""

    label: str
    a: Node | None
    b: Node | None
    times: int = 1

    @property
    def same(self) -> bool:
        """Whether both parts and all parts below them are equal."""
        return self.a is not None and self.b is not None and self.form[0] == self.form[1]

    @property
    def form(self) -> tuple[object, object]:
        """Everything but the paths."""
        return (self.a and self.a.form, self.b and self.b.form)

    @property
    def own_same(self) -> bool:
        """Whether the parts are equal, apart from the parts below them."""
        return self.a is not None and self.b is not None and _own(self.a) == _own(self.b)


def diff_body(result: Diff, names: tuple[str, str]) -> str:
    """Return the content of the page."""
    length = min(usual_length(result.a), usual_length(result.b))
    costs = account(result.a, length), account(result.b, length)
    counts = "".join(badge(status, f"{number} {status}") for status in STYLES if (number := result.summary[status]))
    root = Pair("model", costs[0].tree, costs[1].tree)
    return (
        f"<h1>dovetail diff</h1><p>{_letter('A')}{text(names[0])}<br>{_letter('B')}{text(names[1])}</p>"
        f'<p class="counts">{counts}</p>'
        f"{facts(_facts(*costs))}{_fields(result)}"
        f"<h2>Parts</h2>{_pair(root)}<h2>Tensors</h2>{''.join(_tensors(result, status) for status in STYLES)}"
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


def _fields(result: Diff) -> str:
    """Return the fields that differ."""
    rows = "".join(
        f'<div class="tensor"><code>{text(paths)}</code><div class="sides"><div>{_letter("A")}{text(a)}</div>'
        f"<div>{_letter('B')}{text(b)}</div></div></div>"
        for paths, a, b in field_groups(result)
    )
    return f"<h2>Fields that differ</h2>{rows or '<p>none</p>'}"


# -- parts, side by side ------------------------------------------------------------------------------------------------


def _pair(pair: Pair) -> str:
    """Return one part of both models; unfolded where something in it differs."""
    status = "" if pair.own_same else badge("new" if pair.a is None else "dropped" if pair.b is None else "changed")
    sides = "" if pair.own_same else f'<div class="sides">{_sides(pair)}</div>'
    node = pair.b or pair.a
    assert node is not None
    kind = f'<span class="kind">{text(node.kind)}</span>' if pair.own_same else ""
    number = f'<span class="soft">{text(_parameters(pair))}</span>'
    head = f'<span class="label">{text(pair.label)}</span>{kind}{status}{number}'
    same = "".join(f"<p>{text(' · '.join(description(node)))}</p>") if pair.own_same and node.about else ""
    inside = sides + same + "".join(map(_pair, _children(pair)))
    style = "pair" if pair.own_same else "pair differs"
    if not inside:
        return f'<div class="{style}"><span class="head">{head}</span></div>'
    unfolded = " open" if pair.a is not None and pair.b is not None and not pair.same else ""
    return f'<details class="{style}"{unfolded}><summary><span class="head">{head}</span></summary>{inside}</details>'


def _sides(pair: Pair) -> str:
    """Return both parts with their fields, and with their shapes where the fields do not tell them apart."""
    words = [[] if node is None else [node.kind, *description(node)] for node in (pair.a, pair.b)]
    if words[0] == words[1]:
        words = [[*words[i], *_shapes(node)] for i, node in enumerate((pair.a, pair.b))]
    return "".join(f"<div>{_letter('AB'[i])}{text(' · '.join(words[i]) or 'none')}</div>" for i in range(2))


def _shapes(node: Node | None) -> list[str]:
    return [] if node is None else [f"{name} {shape_text(shape)}" for name, shape in node.shapes.items()]


def _letter(letter: str) -> str:
    return f'<span class="side-name">{letter}</span>'


def _parameters(pair: Pair) -> str:
    a, b = (0 if node is None else node.parameters * pair.times for node in (pair.a, pair.b))
    return "" if not a and not b else f"{count(a)} parameters" if a == b else f"{count(a)} → {count(b)} parameters"


def _children(pair: Pair) -> list[Pair]:
    """Return the parts below a pair by name, in the order of a and then of b; equal neighboring layers are one."""
    below = [{} if node is None else {_name(child, node): child for child in node.children} for node in (pair.a, pair.b)]
    pairs = [Pair(name, below[0].get(name), below[1].get(name)) for name in _merged(list(below[0]), list(below[1]))]
    folded: list[Pair] = []
    for _, group in groupby(pairs, lambda one: (one.label.rpartition(" ")[0] or one.label, one.form)):
        run = list(group)
        label = run[0].label if len(run) == 1 else f"{run[0].label}–{run[-1].label.rpartition(' ')[2]} ×{len(run)}"
        folded.append(run[0]._replace(label=label, times=pair.times * len(run)))
    return folded


def _merged(a: list[str], b: list[str]) -> list[str]:
    """Return the names of both lists: each name of b that a lacks follows the name that it follows in b."""
    names = list(a)
    for i, name in enumerate(b):
        if name not in names:
            names.insert(names.index(b[i - 1]) + 1 if i else 0, name)
    return names


def _name(child: Node, parent: Node) -> str:
    """Return `mixer`, or `layers 3` for a layer."""
    return child.path.removeprefix(parent.path).lstrip(".").replace(".", " ")


def _own(node: Node) -> tuple[object, ...]:
    return node.kind, repr(node.about), repr(node.shapes), repr(node.same_as)


# -- tensors ------------------------------------------------------------------------------------------------------------


def _tensors(result: Diff, status: Status) -> str:
    """Return the tensors of one status; equal rows of several layers are one."""
    groups = tensor_groups(result, status)
    if not groups:
        return ""
    rows = "".join(map(_tensor, groups))
    unfolded = " open" if status in OPEN else ""
    head = f"{badge(status)} {result.summary[status]} tensors"
    return f'<details class="status"{unfolded}><summary>{head}</summary>{rows}</details>'


def _tensor(group: TensorGroup) -> str:
    times = f" ×{group.times}" if group.times > 1 else ""
    sides = "".join(
        f"<div>{_letter(letter)}<code>{text(path)}</code>{times} {text(shape_text(group.shapes[letter.lower()]))}</div>"
        if path
        else f"<div>{_letter(letter)}none</div>"
        for letter, path in (("A", group.a), ("B", group.b))
    )
    how = f'<p class="soft">{text(group.how)}</p>' if group.how else ""
    return f'<div class="tensor"><div class="sides">{sides}</div>{how}</div>'
