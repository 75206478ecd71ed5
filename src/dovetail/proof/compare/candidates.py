"""Candidate bugs: ways in which an implementation may differ, each as one change of a layer (or of the embedding or the head)
of a model whose spec is known.

    fields    every field of every part takes its other values (field_candidates.py)
    tensors   swapped with another of the same shape, transposed, not used; heads in another order; another layer's weights
    edits     changes that no spec can express: a norm or a branch left out, a rotation in the other direction

All candidates follow from declared weights and groups of parts, so that a new part is covered without another line here. A
candidate that needs weights the model does not have is skipped.
"""

from __future__ import annotations

import dataclasses as dc
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.base.errors import DovetailError
from dovetail.model.construction import on_meta, put, set_constants
from dovetail.model.model import Model, ModelModule
from dovetail.nn.groups import Ffn, Mixer, Norm, PositionModule
from dovetail.nn.layout import TokenLayout
from dovetail.nn.module import Module
from dovetail.spec.fold import Declared, declared
from dovetail.spec.part import Part

Tensors = Mapping[str, Tensor]
Weights = Mapping[str, Declared]  # declared weights by their path in the piece


@dc.dataclass(frozen=True)
class Candidate:
    """One possible bug: the name of the cause, where it acts, a description, and the changed piece of the model."""

    cause: str
    place: str
    description: str
    part: Part  # a block, or the whole model for the embedding and the head
    tensors: Tensors = dc.field(default_factory=dict)  # the changed tensors, by their path in the part
    edit: Callable[[nn.Module], None] | None = None


# of a change that cannot be built or run, which is then not the cause
UNRUNNABLE = (DovetailError, RuntimeError, ValueError, IndexError, TypeError, ZeroDivisionError, AssertionError, KeyError)


def with_tensors(
    spec: Model,
    tensors: Tensors,
    dtype: torch.dtype,
    *,
    runs: Callable[[str], bool] = lambda path: True,
    into: ModelModule | None = None,
) -> ModelModule | None:
    """A model of a spec with these tensors as the weights that it `runs`, the others on meta; None where one is missing or has
    another shape. `into` is a model of the spec to put them into."""
    model = into or on_meta(spec, dtype).eval()
    for d in declared(spec):
        if d.weight.role != "const" and runs(d.path):
            if d.path not in tensors or tuple(tensors[d.path].shape) != d.weight.shape(d.scope):
                return None
            put(model, d, tensors[d.path])
    set_constants(model, spec, dtype, "cpu")
    return model


# -- tensors --------------------------------------------------------------------------------------------------------


def swapped(part: Part, tensors: Tensors, weights: Weights) -> Iterator[Candidate]:
    """Two modules whose tensors have the same names and shapes, swapped; and two stacked expert matrices."""
    modules: dict[str, dict[str, Tensor]] = {}
    for path, tensor in tensors.items():
        module, _, leaf = path.rpartition(".")
        modules.setdefault(module, {})[leaf] = tensor
    norms = {path.rpartition(".")[0] for path, d in weights.items() if isinstance(d.part, Norm)}
    for one, other in _pairs(list(modules)):
        shapes = [{leaf: tensor.shape for leaf, tensor in modules[name].items()} for name in (one, other)]
        if shapes[0] != shapes[1] or all(modules[one][leaf].equal(modules[other][leaf]) for leaf in shapes[0]):
            continue
        new = {f"{here}.{leaf}": t for here, there in ((one, other), (other, one)) for leaf, t in modules[there].items()}
        cause = "swapped norms" if {one, other} <= norms else _swap_cause(one, other)
        yield Candidate(cause, one, f"{one} and {other} swapped", part, new)
    for one, other in _pairs([path for path, d in weights.items() if d.weight.batch]):
        if one in tensors and other in tensors and tensors[one].shape == tensors[other].shape:
            new = {one: tensors[other], other: tensors[one]}
            yield Candidate(_swap_cause(one, other), one, f"{one} and {other} swapped", part, new)


def _pairs(names: list[str]) -> Iterator[tuple[str, str]]:
    return ((one, other) for i, one in enumerate(names) for other in names[i + 1 :])


def _swap_cause(one: str, other: str) -> str:
    first, second = sorted(path.rpartition(".")[2] for path in (one, other))
    return f"{first} and {second} swapped"


def transposed(part: Part, tensors: Tensors) -> Iterator[Candidate]:
    """A square matrix transposed."""
    for path, tensor in tensors.items():
        if tensor.dim() >= 2 and tensor.shape[-1] == tensor.shape[-2]:
            new = {path: tensor.transpose(-1, -2).contiguous()}
            yield Candidate("transposed weight", path, f"{path} transposed", part, new)


def unused(part: Part, tensors: Tensors, weights: Weights) -> Iterator[Candidate]:
    """A tensor that is not used: a bias of 0, a norm's scale of 1 or off by one, a matrix of 0."""
    for path, tensor in tensors.items():
        zero = torch.zeros_like(tensor)
        if tensor.dim() > 1:
            yield Candidate("weight missing", path, f"{path} is 0", part, {path: zero})
        elif weights[path].weight.role == "bias":
            yield Candidate("bias missing", path, f"{path} is not added", part, {path: zero})
        else:
            yield Candidate("norm's weight missing", path, f"{path} is not used", part, {path: zero + 1})
            yield Candidate("norm's + 1", path, f"{path} + 1", part, {path: tensor + 1})
            yield Candidate("norm's + 1", path, f"{path} − 1", part, {path: tensor - 1})


def head_orders(part: Part, tensors: Tensors, weights: Weights) -> Iterator[Candidate]:
    """Query heads assigned to KV heads as h mod kv_heads instead of h ÷ group size; outputs joined as (channel, head)."""
    by_part: dict[str, list[str]] = {}
    for path, d in weights.items():
        by_part.setdefault(path.removesuffix(f".{d.weight.name}"), []).append(path)
    for place, paths in by_part.items():
        queries = [path for path in paths if weights[path].weight.out[:1] == ("heads",) and path in tensors]
        outputs = [path for path in paths if weights[path].weight.inp[:1] == ("heads",) and path in tensors]
        if not queries or not outputs:
            continue
        scope = weights[queries[0]].scope
        heads, kv_heads = scope.size("heads"), scope.sizes.get("kv_heads", 1)
        size = tensors[outputs[0]].shape[1] // heads
        if 1 < kv_heads < heads:
            order = torch.arange(heads).view(heads // kv_heads, kv_heads).T.reshape(-1)
            new = {path: _reorder(tensors[path], order, 0) for path in queries}
            new |= {path: _reorder(tensors[path], order, 1) for path in outputs}
            description = f"{place}: query head h reads KV head h mod {kv_heads}, not h ÷ {heads // kv_heads}"
            yield Candidate("KV head order", place, description, part, new)
        columns = torch.arange(heads * size).view(heads, size).T.reshape(-1)
        for order in (columns, columns.argsort()):
            new = {path: tensors[path][:, order] for path in outputs}
            yield Candidate("heads and channels swapped", place, f"{place}: heads are joined as (channel, head)", part, new)


def _reorder(x: Tensor, order: Tensor, dim: int) -> Tensor:
    """Reorder the heads of a dimension of (heads · size)."""
    return x.unflatten(dim, (len(order), -1)).index_select(dim, order).flatten(dim, dim + 1)


def other_layers(part: Part, tensors: Tensors, others: Mapping[str, Tensors]) -> Iterator[Candidate]:
    """The weights of another layer."""
    shapes = {path: tensor.shape for path, tensor in tensors.items()}
    for name, other in others.items():
        if {path: tensor.shape for path, tensor in other.items()} == shapes:
            yield Candidate("another layer's weights", "", f"the weights of {name}", part, other)


# -- edits ----------------------------------------------------------------------------------------------------------


class ReturnInput(nn.Module):
    """Returns its input."""

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        """Return x."""
        return x


class Zero(nn.Module):
    """Returns zeros."""

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        """Return zeros of the shape of x."""
        return torch.zeros_like(x)


def edits(part: Part, module: Module, norm_fields: Callable[[Part], Iterator[Candidate]]) -> Iterator[Candidate]:
    """Changes of the modules below `module`: one norm with another field (a spec has one norm for all of a layer), a norm or a
    branch left out, a rotation in the other direction or one position late."""
    for path, below in module.named_modules():
        if not isinstance(below, Module) or not path:
            continue
        if isinstance(below.part, Norm):
            for other in norm_fields(below.part):
                if type(other.part) is type(below.part):
                    edit = _with_part(path, other.part)
                    yield Candidate(other.cause, path, f"{path}.{other.description}", part, edit=edit)
            yield Candidate("norm missing", path, f"{path} is left out", part, edit=_with_module(path, ReturnInput()))
        elif isinstance(below.part, (Mixer, Ffn)):
            yield Candidate("branch missing", path, f"{path} adds nothing", part, edit=_with_module(path, Zero()))
        elif isinstance(below, PositionModule) and type(below).rotate is not PositionModule.rotate:
            backwards, late = _moved(path, lambda order: -order, keys=True), _moved(path, lambda order: order + 1, keys=False)
            yield Candidate("rotary direction", path, f"{path} rotates in the other direction", part, edit=backwards)
            yield Candidate("position offset", path, f"{path}: queries are one position late", part, edit=late)


def _with_part(path: str, other: Part) -> Callable[[nn.Module], None]:
    def edit(module: nn.Module) -> None:
        typing.cast(Any, module.get_submodule(path)).part = other

    return edit


def _with_module(path: str, other: nn.Module) -> Callable[[nn.Module], None]:
    return lambda module: module.set_submodule(path, other)


def _moved(path: str, move: Callable[[Tensor], Tensor], *, keys: bool) -> Callable[[nn.Module], None]:
    """Rotate queries (and keys) as if they stood at other positions."""

    def moved(function: Callable[..., Tensor]) -> Callable[[Tensor, TokenLayout], Tensor]:
        return lambda x, layout: function(x, TokenLayout(None, move(layout.order), None))

    def edit(module: nn.Module) -> None:
        position = typing.cast(Any, module.get_submodule(path))
        position.rotate = moved(position.rotate)
        if keys:
            position.on_write, position.on_read = moved(position.on_write), moved(position.on_read)

    return edit
