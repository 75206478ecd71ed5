"""Account: parameters, FLOPs per token and decode-state size of a model, from its spec alone. No weight is allocated.

parameters                         learned values; a tied weight counts once
flops_per_token.matmul             2 · (weights that a token is multiplied by)
flops_per_token.attention          score and value products over `length` tokens, all pairs, divided by `length`
flops_per_token.attention_causal   the same for the pairs that masks leave
flops_per_token.mtp                multi-token prediction in training, matmul and attention over the pairs that masks leave
state_bytes                        bytes of the decode state after `length` tokens (and `length` source tokens, with an encoder)
state_values_per_token             values that the first token adds to the decode state
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Iterator
from fractions import Fraction
from functools import cached_property
from math import prod
from typing import Any

import torch

from dovetail.base.dtypes import SHORT, dtype_of, short_dtype_name
from dovetail.model.model import Model
from dovetail.model.multi_token import head_reads, reads_tokens
from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout
from dovetail.nn.module import make
from dovetail.spec.check import check
from dovetail.spec.fold import (
    active_parameters,
    ahead_flops,
    attention_flops,
    declared,
    matmul_flops,
    parameters,
    position_limit,
    states as declared_states,
)
from dovetail.spec.part import Part, default_of, plain, walk, weights_of
from dovetail.spec.part_info import summary_of
from dovetail.spec.scope import Scope
from dovetail.spec.weight import State

DTYPES = {short: torch.float8_e4m3fn if name == "float8" else dtype_of(name) for short, name in SHORT.items()}
BYTES = {name: dtype.itemsize for name, dtype in DTYPES.items()}
WHOLE_NUMBER = torch.int64.itemsize
USUAL_LENGTH = 2048
LONGEST_PERIOD = 16  # layers in the longest pattern that `runs` detects


@dc.dataclass(frozen=True)
class TreeNode:
    """One part of the module tree, with its children."""

    path: str
    kind: str
    summary: str  # the first line of the part's docstring
    about: dict[str, Any]  # axis sizes it defines, fields that differ from their default, parts without a module
    shapes: dict[str, tuple[int, ...]]  # of its own parameters
    same_as: dict[str, str]  # tied weights: name -> path of the weight they are tied to
    children: list[TreeNode]

    @cached_property
    def parameters(self) -> int:
        """The number of parameters of this part and its children."""
        return sum(map(prod, self.shapes.values())) + sum(child.parameters for child in self.children)

    @cached_property
    def form(self) -> tuple[Any, ...]:
        """Everything but the path: equal for equal layers."""
        return (self.kind, repr(self.about), repr(self.shapes), *(child.form for child in self.children))


def tree(spec: Part) -> TreeNode:
    """Return the module tree with the shape of every parameter."""
    open_nodes: list[tuple[TreeNode, Scope]] = []
    for path, part, scope in walk(spec):
        while open_nodes and not path.startswith(f"{open_nodes[-1][0].path}.".lstrip(".")):
            open_nodes.pop()
        above = open_nodes[-1][1] if open_nodes else Scope()
        weights = weights_of(part, scope)
        shapes = {w.name: w.shape(scope) for w in weights if w.learned}
        same_as = {w.name: w.same_as for w in weights if w.same_as is not None}
        node = TreeNode(path, part.kind, summary_of(type(part)), _about(part, scope, above), shapes, same_as, [])
        if open_nodes:
            open_nodes[-1][0].children.append(node)
        open_nodes.append((node, scope))
    return open_nodes[0][0]


def runs(nodes: list[TreeNode]) -> list[tuple[list[TreeNode], int]]:
    """Fold repeated layers: (the layers of one period, the number of repeats). The layers local, full, local, full are one run
    of two layers, twice; a node that is not a numbered layer is a run of its own."""
    folded: list[tuple[list[TreeNode], int]] = []
    begin = 0
    while begin < len(nodes):
        period, times = 1, 1
        if nodes[begin].path.rpartition(".")[2].isdigit():
            for size in range(1, min(LONGEST_PERIOD, (len(nodes) - begin) // 2) + 1):
                repeats = _repeats(nodes[begin:], size)
                if repeats > 1 and size * repeats > period * times:
                    period, times = size, repeats
        folded.append((nodes[begin : begin + period], times))
        begin += period * times
    return folded


def _repeats(nodes: list[TreeNode], size: int) -> int:
    """How many times in a row the first `size` nodes occur."""
    times = 1
    while (times + 1) * size <= len(nodes) and all(nodes[times * size + i].form == nodes[i].form for i in range(size)):
        times += 1
    return times


def _about(part: Part, scope: Scope, above: Scope) -> dict[str, Any]:
    """The sizes and fields of a part that `show` prints beside its kind. A model's width is printed in any case: every shape
    follows from it."""
    axes = {axis for w in weights_of(part, scope) if w.role != "const" for axis in scope.names((*w.batch, *w.out, *w.inp))}
    sizes = {axis: scope.sizes[axis] for axis in scope.sizes if axis in axes and scope.sizes[axis] != above.sizes.get(axis)}
    fields: dict[str, Any] = {"width": part.width} if isinstance(part, Model) else {}
    for field in dc.fields(part):
        value = getattr(part, field.name)
        items = value if isinstance(value, tuple) else (value,)
        if any(isinstance(item, Part) and item.module is not None for item in items):
            continue  # a child has a node of its own
        if isinstance(value, Part) or (value != default_of(field) and field.name not in sizes):
            fields[field.name] = plain(value)
    # print a size once: `hidden: 704` is the axis `ffn`
    repeated = {name for name, value in fields.items() if type(value) is int and value in sizes.values()}
    return {**sizes, **{name: value for name, value in fields.items() if name not in repeated}}


@dc.dataclass(frozen=True)
class Cost:
    """The cost of a part and the parts below it: FLOPs per token, and bytes of decode state per sequence and per token."""

    matmul: float = 0
    attention: float = 0  # over the pairs that masks leave
    state_bytes: int = 0  # after `length` tokens
    state_bytes_per_token: int = 0  # while no window is full


@dc.dataclass(frozen=True)
class Account:
    """The figures of a spec at one length and one dtype."""

    spec: Model
    length: int
    dtype: str  # a short name: bf16

    @cached_property
    def tree(self) -> TreeNode:
        """The module tree."""
        return tree(self.spec)

    @cached_property
    def costs(self) -> dict[str, Cost]:
        """Path of a part -> the cost of that part and all parts below it."""
        totals: dict[str, list[float]] = {}
        ahead: dict[str, bool] = {}
        for path, part, scope in walk(self.spec):
            matmul = sum((2 * prod(w.shape(scope)) * w.used for w in weights_of(part, scope) if w.matmul), Fraction(0))
            attention = part.cost(scope, self.length)[1] / self.length
            after, empty, one = (sum(self._bytes(state, scope, n) for state in part.state(scope)) for n in (self.length, 0, 1))
            own = (float(matmul), attention, after, one - empty)
            totals[path], ahead[path] = [0.0] * len(own), scope.drafts
            for above in and_above(path):
                if above in totals:  # FLOPs of multi-token prediction are no part of the model's
                    added = own if ahead[above] == scope.drafts else (0.0, 0.0, *own[2:])
                    totals[above] = [total + value for total, value in zip(totals[above], added, strict=True)]
        return {path: Cost(t[0], t[1], int(t[2]), int(t[3])) for path, t in totals.items()}

    @cached_property
    def flops_per_token(self) -> dict[str, int | float]:
        """FLOPs per token: matmul, attention, attention_causal; mtp where there is multi-token prediction."""
        all_pairs, masked_pairs = attention_flops(self.spec, self.length)
        work = {
            "matmul": matmul_flops(self.spec),
            "attention": _per_token(all_pairs, self.length),
            "attention_causal": _per_token(masked_pairs, self.length),
        }
        mtp = {"mtp": _per_token(mtp_flops(self.spec, self.length)[1], self.length)} if self.spec.mtp else {}
        return {**work, **mtp}

    @cached_property
    def states(self) -> list[tuple[State, Scope]]:
        """The declared decode states; none for a bidirectional model."""
        return [(state, scope) for _, state, scope in declared_states(self.spec)]

    def state_values(self, n: int) -> int:
        """The number of values in the decode state after n tokens."""
        return sum(state.values(scope, n) for state, scope in self.states)

    def state_bytes(self, n: int) -> int:
        """The bytes of the decode state after n tokens."""
        return sum(self._bytes(state, scope, n) for state, scope in self.states)

    def _bytes(self, state: State, scope: Scope, n: int) -> int:
        return state.values(scope, n) * int(value_bytes(state, BYTES[self.dtype]))

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain data, for JSON."""
        return {
            "parameters": parameters(self.spec),
            "active_parameters": active_parameters(self.spec),
            "flops_per_token": self.flops_per_token,
            "state_bytes": self.state_bytes(self.length),
            "state_values_per_token": self.state_values(1) - self.state_values(0),
            "length": self.length,
            "dtype": self.dtype,
            "tree": self._node_data(self.tree),
        }

    def _node_data(self, node: TreeNode) -> dict[str, Any]:
        cost = self.costs[node.path]
        data: dict[str, Any] = {"path": node.path, "kind": node.kind, "parameters": node.parameters}
        data["flops_per_token"] = {"matmul": cost.matmul, "attention_causal": cost.attention}
        data["state_bytes"] = cost.state_bytes
        data["shapes"] = {name: list(shape) for name, shape in node.shapes.items()}
        if node.same_as:
            data["same_as"] = node.same_as
        return {**data, "children": [self._node_data(child) for child in node.children]}


def mtp_flops(spec: Model, n: int) -> tuple[int, int]:
    """FLOPs of multi-token prediction over n tokens in training, the head at each depth included: (all pairs; the pairs that
    masks leave). An embedding that is projected to the width is projected once more, without positions."""
    embed, head = (_matmul_in(spec, child) for child in ("embed", "head"))
    tokens = sum(max(n - k, 0) * head_reads(depth) for k, depth in enumerate(spec.mtp, 1))
    shared = n * embed * reads_tokens(spec.mtp) + tokens * head
    all_pairs, masked_pairs = ahead_flops(spec, n)
    return shared + all_pairs, shared + masked_pairs


def _matmul_in(spec: Model, child: str) -> int:
    """Matmul FLOPs per token in one child of a model."""
    return sum(2 * d.size for d in declared(spec) if d.weight.matmul and d.path.startswith(f"{child}."))


def account(spec: Model, length: int | None = None, dtype: str = "bf16") -> Account:
    """Check a spec and return its account at `length` tokens (by default `usual_length`); bfloat16 is bf16."""
    check(spec)
    return Account(spec, usual_length(spec) if length is None else length, short_dtype_name(dtype))


def value_bytes(state: State, each: float) -> float:
    """The bytes of one value of a decode state, in a model whose values have `each`."""
    if state.dtype == "int64":
        return WHOLE_NUMBER
    return max(each, BYTES["fp32"]) if state.at_least_fp32 else each


def usual_length(spec: Model) -> int:
    """2048 tokens, or the longest length that the model takes, where that is shorter."""
    longest = longest_length(spec)
    return USUAL_LENGTH if longest is None else min(USUAL_LENGTH, longest)


def longest_length(spec: Model) -> int | None:
    """The longest sequence the model takes: rows of a position table, or tokens per image; None: no limit."""
    limit = position_limit(spec)
    return limit if limit is not None or spec.embed.causal() else _tokens_per_input(spec)


def _tokens_per_input(spec: Model) -> int:
    """The number of tokens that the embedding returns for one input (an image), from a forward pass on the meta device."""
    scope = spec.child_scope(spec.axes(Scope()), "embed")
    module = make(spec.embed, dc.replace(scope, path="embed"))
    example = spec.embed.example(scope, 1, 1, torch.Generator().manual_seed(0))
    x, _ = module(example.to("meta", torch.float32), Ctx(layout=TokenLayout.whole(1, 1, device="meta")))
    return x.shape[-2]


def format_value(value: Any) -> str:
    """Format plain data in one line: {kind: window, size: 8} is `window(size 8)`."""
    if isinstance(value, dict):
        fields = ", ".join(f"{name} {format_value(item)}" for name, item in value.items() if name != "kind")
        return f"{value.get('kind', '')}({fields})"
    if isinstance(value, list):
        return f"[{', '.join(map(format_value, value))}]"
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def and_above(path: str) -> Iterator[str]:
    """Yield the path and every path above it, up to the root."""
    yield path
    while path:
        path = path.rpartition(".")[0]
        yield path


def _per_token(total: int, n: int) -> int | float:
    return total // n if total % n == 0 else total / n
