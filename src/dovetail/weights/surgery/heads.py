"""Remove heads of attention: the rows and columns of a layer's weights that belong to them.

    z (…, heads, head)  →  z[kept]        q, k, v lose output rows, the output projection loses input columns

A head that is removed computes what a head whose output is replaced by 0 does, so the logits are those of the ablation
`{"layers.1.mixer.z[head=2]": 0}`. Query heads that share a KV head are removed together.          Michel et al. 2019
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from dovetail.base.errors import SpecError
from dovetail.model.construction import on_meta, set_constants, tie
from dovetail.model.model import Model, ModelModule
from dovetail.nn.groups import Mask
from dovetail.nn.module import tensor_at
from dovetail.spec.fold import declared
from dovetail.spec.part import Part
from dovetail.spec.weight import KV_HEADS
from dovetail.weights.surgery.change import sizes

HEADS = "heads"


def prune_heads(model: ModelModule, heads: Mapping[int, Collection[int]]) -> ModelModule:
    """Return a model without these heads (layer → numbers of heads), with copies of the weights that are left."""
    kept = {layer: _kept(model.part, layer, removed) for layer, removed in heads.items() if removed}
    spec = model.part
    for layer, (queries, groups, size) in kept.items():
        spec = _with_heads(spec, layer, len(queries), len(groups), size)
    weights = next(model.parameters())
    pruned = on_meta(spec, weights.dtype)
    shapes = {d.path: d.weight.shape(d.scope) for d in declared(spec)}
    tensors: dict[str, Tensor] = {}
    for d in declared(model.part):
        if d.weight.stored:
            picks = next((picks for layer, picks in kept.items() if d.path.startswith(f"layers.{layer}.mixer.")), None)
            tensor = _selected(tensor_at(model, d.path).detach(), sizes(d.weight, d.scope), picks)
            tensors[d.path] = tensor.reshape(shapes[d.path])
    pruned.load_state_dict(tensors, assign=True, strict=False)
    set_constants(pruned, spec, weights.dtype, weights.device)
    tie(pruned, spec)
    return pruned


def _kept(spec: Model, layer: int, removed: Collection[int]) -> tuple[list[int], list[int], int]:
    """(query heads, KV heads) that are left, and the size of a head."""
    path = f"layers.{layer}.mixer"
    if not 0 <= layer < len(spec.layers):
        raise SpecError("layers", f"there is no layer {layer}", f"layers are 0 to {len(spec.layers) - 1}")
    scopes = [d.scope for d in declared(spec) if d.path.startswith(f"{path}.") and HEADS in d.scope.sizes]
    mixer = spec.layers[layer].mixer
    if not scopes or not isinstance(mixer, Part) or not {"heads", "kv_heads", "head"} <= {f.name for f in dc.fields(mixer)}:
        raise SpecError(path, "has no heads of attention to remove", "name layers whose mixer is attention")
    for name in (f.name for f in dc.fields(mixer)):
        if isinstance(mask := getattr(mixer, name), Mask) and mask.by_head():
            problem = "the mask differs by head, so heads cannot change their number"
            raise SpecError(f"{path}.{name}", problem, "use one mask for all heads")
    for d in declared(spec):  # the mixer's own constant numbers its heads; those of parts below it differ by head
        if d.weight.role == "const" and d.path.startswith(f"{path}.") and d.path != f"{path}.{d.weight.name}":
            if HEADS in (*d.weight.out, *d.weight.inp):
                problem = "is computed from the number of heads"
                raise SpecError(d.path, problem, "swap the part first, or replace the outputs of heads by 0")
    sizes_of = scopes[0].sizes
    count, groups = sizes_of[HEADS], sizes_of.get(KV_HEADS, sizes_of[HEADS])
    if wrong := sorted(head for head in removed if not 0 <= head < count):
        raise SpecError(path, f"has no head {wrong[0]}", f"heads are 0 to {count - 1}")
    shared = count // groups
    left = [g for g in range(groups) if not {*range(g * shared, (g + 1) * shared)} <= {*removed}]
    queries = [head for g in left for head in range(g * shared, (g + 1) * shared)]
    if partial := sorted({*removed} & {*queries}):
        problem = f"head {partial[0]} shares its keys and values with {shared - 1} other heads"
        raise SpecError(path, problem, "remove all heads of a KV head, or none")
    if not queries:
        raise SpecError(path, "no head is left", "keep one; graft removes whole layers")
    return queries, left, sizes_of["head"]


def _with_heads(spec: Model, layer: int, queries: int, groups: int, size: int) -> Model:
    """The spec with another number of heads of the same size in one layer."""
    path = f"layers.{layer}.mixer"
    return spec.set(f"{path}.heads", queries).set(f"{path}.kv_heads", groups).set(f"{path}.head", size)


def _selected(tensor: Tensor, axes: Mapping[str, int], picks: tuple[list[int], list[int], int] | None) -> Tensor:
    """A copy of the tensor with the heads that are left."""
    if picks is None:
        return tensor.clone()
    whole = tensor.reshape(tuple(axes.values()))
    for dim, axis in enumerate(axes):
        index = {HEADS: picks[0], KV_HEADS: picks[1]}.get(axis.removesuffix(" (in)"))
        if index is not None:
            whole = whole.index_select(dim, torch.tensor(index, device=tensor.device))
    return whole
