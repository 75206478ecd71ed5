"""The account of a model: what it holds, what a token costs, what decoding remembers. From the spec alone; no weight is made.

parameters                     learned numbers, a shared one counted once
flops_per_token.matmul         2 · (numbers a token is multiplied with)
flops_per_token.attention      score and value products over `length` tokens, by token: all pairs; and those masks let through
state_bytes                    what `length` tokens leave behind in a decoder's memory (and a source as long, if it has one)
state_values_per_token         numbers one token leaves behind while no window is full
"""

from __future__ import annotations

import dataclasses as dc
from functools import cached_property
from math import prod
from typing import Any, Literal

import torch

from dovetail.core.check import check
from dovetail.core.ctx import Ctx
from dovetail.core.fold import active_parameters, attention_flops, declared, matmul_flops, parameters, states
from dovetail.core.layout import TokenLayout
from dovetail.core.module import make
from dovetail.core.part import Part, default_of, plain, walk
from dovetail.core.scope import Scope
from dovetail.core.weight import State
from dovetail.model import Model

Dtype = Literal["fp64", "fp32", "bf16", "fp16", "fp8"]
BYTES: dict[Dtype, int] = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
USUAL_LENGTH = 2048
LONGEST_PERIOD = 16  # layers in a pattern that is looked for


@dc.dataclass(frozen=True)
class Node:
    """One part in the module tree with what lies below it."""

    path: str
    kind: str
    about: dict[str, Any]  # axis sizes it defines, fields that are not the default, parts without a module
    shapes: dict[str, tuple[int, ...]]  # its own learned tensors
    same_as: dict[str, str]  # tensors that are another's
    children: list[Node]

    @cached_property
    def parameters(self) -> int:
        """Learned numbers here and below."""
        return sum(map(prod, self.shapes.values())) + sum(child.parameters for child in self.children)

    @cached_property
    def form(self) -> tuple[Any, ...]:
        """All but the path: equal for layers that look alike."""
        return (self.kind, repr(self.about), repr(self.shapes), *(child.form for child in self.children))

    def to_data(self) -> dict[str, Any]:
        """Plain data, nested."""
        data: dict[str, Any] = {"path": self.path, "kind": self.kind, "parameters": self.parameters}
        data["shapes"] = {name: list(shape) for name, shape in self.shapes.items()}
        if self.same_as:
            data["same_as"] = self.same_as
        return {**data, "children": [child.to_data() for child in self.children]}


def tree(spec: Part) -> Node:
    """The module tree with every shape."""
    open_nodes: list[tuple[Node, Scope]] = []
    for path, part, scope in walk(spec):
        while open_nodes and not path.startswith(f"{open_nodes[-1][0].path}.".lstrip(".")):
            open_nodes.pop()
        above = open_nodes[-1][1] if open_nodes else Scope()
        weights = part.weights(scope)
        shapes = {w.name: w.shape(scope) for w in weights if w.learned}
        same_as = {w.name: w.same_as for w in weights if w.same_as is not None}
        node = Node(path, part.kind, _about(part, scope, above), shapes, same_as, [])
        if open_nodes:
            open_nodes[-1][0].children.append(node)
        open_nodes.append((node, scope))
    return open_nodes[0][0]


def runs(nodes: list[Node]) -> list[tuple[list[Node], int]]:
    """Neighboring layers folded: (the layers of one period, how often they come). A pattern of local, full, local, full is
    one run of two layers, twice; whatever is no numbered layer stays alone."""
    found: list[tuple[list[Node], int]] = []
    begin = 0
    while begin < len(nodes):
        period, times = 1, 1
        if nodes[begin].path.rpartition(".")[2].isdigit():
            for size in range(1, min(LONGEST_PERIOD, (len(nodes) - begin) // 2) + 1):
                repeats = _repeats(nodes[begin:], size)
                if repeats > 1 and size * repeats > period * times:
                    period, times = size, repeats
        found.append((nodes[begin : begin + period], times))
        begin += period * times
    return found


def _repeats(nodes: list[Node], size: int) -> int:
    """How often the first `size` nodes come again and again."""
    same = 1
    while (same + 1) * size <= len(nodes) and all(nodes[same * size + i].form == nodes[i].form for i in range(size)):
        same += 1
    return same


def _about(part: Part, scope: Scope, above: Scope) -> dict[str, Any]:
    """What is worth saying of a part beside its name and its children."""
    axes = {axis for w in part.weights(scope) if w.role != "const" for axis in scope.names((*w.batch, *w.out, *w.inp))}
    sizes = {axis: scope.sizes[axis] for axis in scope.sizes if axis in axes and scope.sizes[axis] != above.sizes.get(axis)}
    said: dict[str, Any] = {}
    for field in dc.fields(part):
        value = getattr(part, field.name)
        held = value if isinstance(value, tuple) else (value,)
        if any(isinstance(item, Part) and item.module() is not None for item in held):
            continue  # it has a line of its own
        if isinstance(value, Part) or (value != default_of(field) and field.name not in sizes):
            said[field.name] = plain(value)
    # a size is said once: `hidden: 704` is the axis `ffn`
    given = {name for name, value in said.items() if type(value) is int and value in sizes.values()}
    return {**sizes, **{name: value for name, value in said.items() if name not in given}}


@dc.dataclass(frozen=True)
class Account:
    """A spec read at one length and one dtype."""

    spec: Model
    length: int
    dtype: Dtype

    @cached_property
    def tree(self) -> Node:
        """Its parts."""
        return tree(self.spec)

    @cached_property
    def flops_per_token(self) -> dict[str, int | float]:
        """matmul, attention, attention_causal."""
        whole, let_through = attention_flops(self.spec, self.length)
        return {
            "matmul": matmul_flops(self.spec),
            "attention": _share(whole, self.length),
            "attention_causal": _share(let_through, self.length),
        }

    @cached_property
    def remembered(self) -> list[tuple[State, Scope]]:
        """What is kept while decoding; nothing where tokens wait for later ones."""
        return [(state, scope) for _, state, scope in states(self.spec)]

    def state_values(self, n: int) -> int:
        """Numbers kept after n tokens."""
        return sum(state.values(scope, n) for state, scope in self.remembered)

    def state_bytes(self, n: int) -> int:
        """Bytes kept after n tokens."""
        each = BYTES[self.dtype]
        return sum(
            state.values(scope, n) * (max(each, BYTES["fp32"]) if state.at_least_fp32 else each)
            for state, scope in self.remembered
        )

    def to_data(self) -> dict[str, Any]:
        """Plain data, for machines."""
        return {
            "parameters": parameters(self.spec),
            "active_parameters": active_parameters(self.spec),
            "flops_per_token": self.flops_per_token,
            "state_bytes": self.state_bytes(self.length),
            "state_values_per_token": self.state_values(1) - self.state_values(0),
            "length": self.length,
            "dtype": self.dtype,
            "tree": self.tree.to_data(),
        }


def account(spec: Model, length: int | None = None, dtype: Dtype = "bf16") -> Account:
    """The account of a checked spec at `length` tokens (by default `usual_length`)."""
    check(spec)
    return Account(spec, usual_length(spec) if length is None else length, dtype)


def usual_length(spec: Model) -> int:
    """2048 tokens, or fewer where the model takes no more."""
    longest = longest_length(spec)
    return USUAL_LENGTH if longest is None else min(USUAL_LENGTH, longest)


def longest_length(spec: Model) -> int | None:
    """The most tokens it takes: rows of a table of positions, or what an image gives; None where there is no end."""
    ends = [d.scope.size("position") for d in declared(spec) if "position" in d.weight.out]
    if ends or spec.embed.causal():
        return min(ends, default=None)
    return _tokens_given(spec)


def _tokens_given(spec: Model) -> int:
    """How many tokens an embedding that sets the length itself makes of one input: asked of its module, on meta."""
    scope = spec.child_scope(spec.axes(Scope()), "embed")
    module = make(spec.embed, dc.replace(scope, path="embed"))
    example = spec.embed.example(scope, 1, 1, torch.Generator().manual_seed(0))
    x, _ = module(example.to("meta", torch.float32), Ctx(layout=TokenLayout.whole(1, 1, device="meta")))
    return x.shape[-2]


def say(value: Any) -> str:
    """Plain data in a few words: {kind: window, size: 8} is `window(size 8)`."""
    if isinstance(value, dict):
        fields = ", ".join(f"{name} {say(item)}" for name, item in value.items() if name != "kind")
        return f"{value.get('kind', '')}({fields})"
    if isinstance(value, list):
        return f"[{', '.join(map(say, value))}]"
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def _share(total: int, n: int) -> int | float:
    return total // n if total % n == 0 else total / n
