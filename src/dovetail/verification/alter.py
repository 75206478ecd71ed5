"""Alterations: ways in which an implementation may differ, each as a change of one layer (or of what stands before or behind
the layers) of a model that is known.

    fields    every field of every part takes its other values: flags turned, choices changed, parts of the same group put in
              its place, numbers that people confuse (words.py); new parts and fields are tried without another line here
    tensors   exchanged with another of the same shape, laid on their side, left out; heads in another order; another layer's
    edits     what no spec can say: a norm or a branch left out, a rotation the other way round

What needs weights that are not there is no candidate.
"""

from __future__ import annotations

import dataclasses as dc
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.core.errors import SpecError
from dovetail.core.group import Ffn, Mixer, Norm
from dovetail.core.module import Module
from dovetail.core.part import KINDS, Part, field_types, join, walk_spec
from dovetail.parts.mixer.attention import Attention
from dovetail.parts.mixer.mla import MLA
from dovetail.parts.position.rope import Rope, RopeModule
from dovetail.parts.position.scaling import Linear, Ntk
from dovetail.verification.words import word_of

Tensors = Mapping[str, Tensor]
Scored = (Attention, MLA)  # mixers that scale their scores


@dc.dataclass(frozen=True)
class Alteration:
    """One way to differ: a cause by name, what is different, and the piece of the model that is different so."""

    cause: str
    says: str
    part: Part  # a block, or the whole model for what is no layer's
    tensors: Tensors = dc.field(default_factory=dict)  # those that are not as they were, by their path in the part
    edit: Callable[[nn.Module], None] | None = None


# -- fields ---------------------------------------------------------------------------------------------------------


def fields(part: Part, skip: frozenset[str] = frozenset()) -> Iterator[Alteration]:
    """Every field of a part and of all below it, with each of its other values."""
    for path, below in walk_spec(part):
        if path.split(".")[0] in skip:
            continue
        hints = field_types(type(below))
        for field in dc.fields(below):
            where, value = join(path, field.name), getattr(below, field.name)
            if where.split(".")[0] in skip:
                continue
            word = word_of(below.kind, below.group, field.name, where)
            for other in _others(value, hints[field.name], word.values, below, field.name):
                try:
                    changed = part.replace(where, other)
                except (SpecError, TypeError, ValueError):
                    continue
                yield Alteration(word.cause, f"{where}: {say(other)} instead of {say(value)}", changed)


def _others(value: Any, hint: Any, known: tuple[Any, ...], part: Part, name: str) -> Iterator[Any]:
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    if isinstance(value, bool):
        yield not value
        return
    if value is not None and type(None) in options:
        yield None
    yield from (other for other in known if other != value)
    if isinstance(value, int) and not isinstance(value, bool):
        yield from (other for other in (value - 1, value + 1, value * 2, value // 2) if other > 0)
    elif isinstance(value, float):
        yield from (other for other in (value**2, abs(value) ** 0.5, 1 / value if value else 1.0) if other != value)
    elif isinstance(value, tuple) and len(value) > 1 and isinstance(value[0], Part):  # one of several masks left out
        yield from (tuple(one for one in value if one is not left) for left in value)
    for option in options:
        if typing.get_origin(option) is typing.Literal:
            yield from (other for other in typing.get_args(option) if other != value)
        elif isinstance(option, type) and issubclass(option, Part):
            yield from _kinds(value if isinstance(value, Part) else None, option)


def _kinds(value: Part | None, group: type[Part]) -> Iterator[Part]:
    """Every other kind of a group, with the fields that both have as they were."""
    for kind in KINDS.values():
        if not issubclass(kind, group) or type(value) is kind:
            continue
        shared = (
            {f.name: getattr(value, f.name) for f in dc.fields(value) if f.name in kind.__dataclass_fields__} if value else {}
        )
        try:
            yield kind(**shared)
        except (TypeError, SpecError):
            continue


def say(value: Any) -> str:
    """A value for people: numbers and words as they are, parts by kind."""
    if isinstance(value, Part):
        return value.kind
    if isinstance(value, tuple):
        return " & ".join(map(say, value))
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value).lower()


def score_scales(part: Part, head: int, width: int) -> Iterator[Alteration]:
    """Scores divided by the root of something else, or by nothing."""
    named = {
        "1/√width": width**-0.5,
        "1/head": 1 / head,
        "1/√head": head**-0.5,
        "√head": head**0.5,
        "1": 1.0,
        "1/head²": head**-2.0,
    }
    for path, below in walk_spec(part):
        if isinstance(below, Scored):
            for name, scale in named.items():
                yield Alteration("score scale", f"{join(path, 'scale')}: {name}", part.replace(join(path, "scale"), scale))


def stretched(part: Part) -> Iterator[Alteration]:
    """A rope that is stretched by a plain factor, or whose amplitude is left out."""
    for path, below in walk_spec(part):
        if not isinstance(below, Rope):
            continue
        where, now = join(path, "scaling"), below.scaling
        for kind in (Linear, Ntk):
            for factor in (2.0, 4.0, 8.0, 16.0, 32.0):
                other = kind(factor=factor)
                if other != now:
                    says = f"{where}: {other.kind} by {factor:g} instead of {say(now)}"
                    yield Alteration("rope scaling", says, part.replace(where, other))
        if isinstance(now, Part) and "attention" in now.__dataclass_fields__:
            yield Alteration("rope scaling", f"{where}: without its amplitude", part.replace(join(where, "attention"), 1.0))


# -- tensors --------------------------------------------------------------------------------------------------------


def exchanged(part: Part, tensors: Tensors) -> Iterator[Alteration]:
    """Two tensors of one shape and one leaf taken for each other; of modules, all that they hold."""
    stems: dict[str, dict[str, Tensor]] = {}
    for path, tensor in tensors.items():
        stem, _, leaf = path.rpartition(".")
        stems.setdefault(stem, {})[leaf] = tensor
    names = list(stems)
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            shapes = [{leaf: t.shape for leaf, t in stems[stem].items()} for stem in (one, other)]
            if shapes[0] != shapes[1] or all(stems[one][leaf].equal(stems[other][leaf]) for leaf in shapes[0]):
                continue
            new = {f"{here}.{leaf}": t for here, there in ((one, other), (other, one)) for leaf, t in stems[there].items()}
            yield Alteration(_exchange(one, other), f"{one} and {other} exchanged", part, new)
    experts = [path for path, tensor in tensors.items() if tensor.dim() == 3]
    for i, one in enumerate(experts):
        for other in experts[i + 1 :]:
            if tensors[one].shape == tensors[other].shape:
                new = {one: tensors[other], other: tensors[one]}
                yield Alteration(_exchange(one, other), f"{one} and {other} exchanged", part, new)


def _exchange(one: str, other: str) -> str:
    """Which two things were exchanged, without where they stand."""
    last = sorted(path.rpartition(".")[2] for path in (one, other))
    return "swapped norms" if all("norm" in name for name in last) else f"{last[0]} and {last[1]} exchanged"


def on_their_side(part: Part, tensors: Tensors) -> Iterator[Alteration]:
    """A square matrix transposed."""
    for path, tensor in tensors.items():
        if tensor.dim() >= 2 and tensor.shape[-1] == tensor.shape[-2]:
            yield Alteration("transposed weight", f"{path} transposed", part, {path: tensor.transpose(-1, -2).contiguous()})


def left_out(part: Part, tensors: Tensors) -> Iterator[Alteration]:
    """A vector or matrix that is not used: biases and shifts 0, scales 1 (or 0), matrices 0."""
    for path, tensor in tensors.items():
        leaf = path.rpartition(".")[2]
        zero = torch.zeros_like(tensor)
        if tensor.dim() == 1 and leaf in ("bias", "shift"):
            yield Alteration("bias missing", f"{path} is not added", part, {path: zero})
        elif tensor.dim() == 1:
            yield Alteration("norm's weight missing", f"{path} is not used", part, {path: zero + 1})
            yield Alteration("norm's + 1", f"{path} + 1", part, {path: tensor + 1})
            yield Alteration("norm's + 1", f"{path} − 1", part, {path: tensor - 1})
        else:
            yield Alteration("weight missing", f"{path} is 0", part, {path: zero})


def heads_in_order(part: Part, tensors: Tensors) -> Iterator[Alteration]:
    """Queries that share a key told apart the other way round (h mod kv_heads for h ÷ shared), and (head, channel) for
    (channel, head)."""
    for path, below in walk_spec(part):
        q, o = join(path, "q.weight"), join(path, "o.weight")
        if not isinstance(below, Attention) or q not in tensors or o not in tensors:
            continue
        heads, groups = below.heads, below.groups()
        size = tensors[q].shape[0] // heads
        order = torch.arange(heads).view(heads // groups, groups).T.reshape(-1)  # where each head's query must go
        rows = (order[:, None] * size + torch.arange(size)).reshape(-1)
        if groups not in (1, heads):
            new = {q: tensors[q][rows], o: tensors[o][:, rows]}
            bias = join(path, "q.bias")
            if bias in tensors:
                new[bias] = tensors[bias][rows]
            yield Alteration(
                "kv heads order", f"{path}: query h reads key h mod {groups}, not h ÷ {heads // groups}", part, new
            )
        turned = torch.arange(heads * size).view(heads, size).T.reshape(-1)
        says = f"{path}: heads are joined as (channel, head)"
        for columns in (turned, turned.argsort()):
            yield Alteration("heads and channels exchanged", says, part, {o: tensors[o][:, columns]})


def other_layers(part: Part, tensors: Tensors, others: Mapping[str, Tensors]) -> Iterator[Alteration]:
    """The weights of another layer."""
    shapes = {path: t.shape for path, t in tensors.items()}
    for name, its in others.items():
        if {path: t.shape for path, t in its.items()} == shapes:
            yield Alteration("another layer's weights", f"the weights of {name}", part, its)


# -- edits ----------------------------------------------------------------------------------------------------------


class Through(nn.Module):
    """Gives what it is given."""

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        """x itself."""
        return x


class Nothing(nn.Module):
    """Gives zeros."""

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        """As many zeros as x has numbers."""
        return torch.zeros_like(x)


def edits(part: Part, module: Module) -> Iterator[Alteration]:
    """A norm or a branch left out; a rotation the other way round. `module` shows what there is."""
    for path, below in module.named_modules():
        if not isinstance(below, Module) or not path:
            continue
        if isinstance(below.part, Norm):
            yield from _one_norm(part, path, below)
            yield Alteration("norm missing", f"{path} is left out", part, edit=_put(path, Through()))
        elif isinstance(below.part, (Mixer, Ffn)):
            yield Alteration("branch missing", f"{path} adds nothing", part, edit=_put(path, Nothing()))
        elif isinstance(below, RopeModule):
            yield Alteration("rotary direction", f"{path} turns the other way", part, edit=_backwards(path))
            yield Alteration("position offset", f"{path}: queries stand one later", part, edit=_later(path))


def _one_norm(part: Part, path: str, norm: Module) -> Iterator[Alteration]:
    """A norm with another field; a spec has one for all the norms of a layer."""
    for one in fields(norm.part):
        if type(one.part) is type(norm.part):
            yield Alteration(one.cause, f"{path}.{one.says}", part, edit=_with_part(path, one.part))


def _with_part(path: str, other: Part) -> Callable[[nn.Module], None]:
    def edit(module: nn.Module) -> None:
        typing.cast(Any, module.get_submodule(path)).part = other

    return edit


def _put(path: str, other: nn.Module) -> Callable[[nn.Module], None]:
    return lambda module: module.set_submodule(path, other)


def _backwards(path: str) -> Callable[[nn.Module], None]:
    def edit(module: nn.Module) -> None:
        rope = typing.cast(Any, module.get_submodule(path))
        rope.frequency = -rope.frequency
        rope.key += " backwards"

    return edit


def _later(path: str) -> Callable[[nn.Module], None]:
    def edit(module: nn.Module) -> None:
        rope = typing.cast(Any, module.get_submodule(path))
        turn = rope.turn
        rope.rotate = lambda q, at: turn(q, type(at)(None, at.order + 1, None))

    return edit
