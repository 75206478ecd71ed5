"""Attach adapters to the linear leaves of a model, merge them into its weights (several: what each changes is combined), and
detach them.

    applied = attach(model, Lora(rank=16))           freezes the model; "applied 168 of 168"
    merged = merge(model)                            W ← the adapted matrix; the model is plain again
    merged.undo()                                    the old W, bit for bit, and its adapters

A target that matches no leaf, a leaf that cannot be adapted, and a leaf that was left out are errors. A weight that several
leaves have (layers that share their weights) has one adapter, which all of them use; a head that is tied to the embedding has
none, since its matrix is the embedding's table.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dovetail.base.errors import SpecError, nearest
from dovetail.disk.yaml import parse_yaml
from dovetail.model.construction import initial
from dovetail.model.model import Model, ModelModule
from dovetail.model.transformer import Transformer
from dovetail.nn.declared_tensors import Absent, adapted_leaves
from dovetail.nn.linear import Adapter, Linear
from dovetail.spec.check import check
from dovetail.spec.fold import Declared, declared
from dovetail.spec.part import from_data
from dovetail.weights.adapters.kind import AdapterKind, AdapterModule, leaf_path

Changes = dict[str, list[tuple[float, Tensor]]]  # by path: (factor, change) of each adapter


class Applied(NamedTuple):
    """The adapters of a model: their kind, the paths of the adapted leaves, and how many were targeted."""

    kind: AdapterKind
    paths: tuple[str, ...]
    targeted: int
    parameters: int

    def __str__(self) -> str:
        counts = f"applied {len(self.paths)} of {self.targeted}"
        return f"{self.kind.kind}: {counts}, {self.parameters:,} trained parameters"


def read_adapter(adapter: AdapterKind | str | Mapping[str, Any], path: str = "adapter") -> AdapterKind:
    """Return the adapter that a name of a kind, a mapping or a part means; raise SpecError for an unknown kind or field."""
    from dovetail.weights.adapters import ia3, lora  # noqa: F401  registers the kinds

    data = parse_yaml(adapter, path) if isinstance(adapter, str) and ":" in adapter else adapter  # {kind: lora, rank: 8}
    kind = data if isinstance(data, AdapterKind) else from_data(data, AdapterKind, path)
    check(kind)
    return kind


def attach(
    model: ModelModule, adapter: AdapterKind | str | Mapping[str, Any], *, seed: int = 0, dtype: torch.dtype | None = None
) -> Applied:
    """Attach an adapter to every targeted leaf of a model and freeze its own weights. On the meta device the adapters are
    there, too, and are given their values with the weights. `dtype` is that of the adapters, by default of the weights."""
    kind, spec = read_adapter(adapter), model.part
    check_bare(model)
    chosen = targeted(kind, spec)
    leaves = dict(_leaves(model, chosen))
    _freeze(model)
    weights = {d.path: d for d in declared(spec)}
    by_weight: dict[str, AdapterModule] = {}
    for d in [d for d in chosen if leaf_path(d) in leaves]:  # of a pipeline, another stage has the others
        leaf, owner = leaves[leaf_path(d)], d.weight.same_as or d.path
        if owner not in by_weight:
            by_weight[owner] = _made(kind, weights[owner], leaf, seed, dtype)
        leaf.adapter = by_weight[owner]
    for path, leaf in leaves.items():
        if leaf.adapter is None:
            raise SpecError(path, "is targeted, but has no adapter", "this is a defect of dovetail; please report it")
    match(model)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return Applied(kind, tuple(leaves), len(chosen), trained)


def targeted(kind: AdapterKind, spec: Model) -> list[Declared]:
    """Every leaf that the targets mean, by its declared weight, in module order. Raises SpecError where a target means none, or
    one that cannot be adapted."""
    weights = {d.path: d for d in declared(spec)}
    leaves = [d for d in weights.values() if d.path.endswith(".weight") and d.weight.matmul]
    chosen: dict[str, Declared] = {}
    for target in kind.targets:
        found = [d for d in leaves if kind.matches(target, d)]
        if not found:
            raise _no_match(kind, target, weights)
        chosen |= {d.path: d for d in found if target == d.weight.role or _able(d, weights)}
    chosen = {path: d for path, d in chosen.items() if _reason(d, weights) is None}
    for d in list(chosen.values()):  # whoever has the weight, and whoever shares it
        owner = d.weight.same_as or d.path
        if owner not in chosen:
            raise SpecError(leaf_path(d), f"uses the weight of {leaf_path(weights[owner])}", "also target that leaf")
        chosen |= {leaf.path: leaf for leaf in leaves if leaf.weight.same_as == owner}
    if not chosen:
        raise SpecError("targets", f"{', '.join(kind.targets)}: no leaf of this model can be adapted", "name leaves by paths")
    return [d for d in leaves if d.path in chosen]


def adaptable(spec: Model) -> list[tuple[str, Declared]]:
    """(path, weight) of every linear leaf that can be adapted and has a weight of its own."""
    weights = {d.path: d for d in declared(spec)}
    leaves = (d for d in weights.values() if d.path.endswith(".weight") and d.weight.matmul and d.weight.learned)
    return [(leaf_path(d), d) for d in leaves]


def _able(d: Declared, weights: Mapping[str, Declared]) -> bool:
    """True; raise SpecError with the reason where a leaf cannot be adapted."""
    if reason := _reason(d, weights):
        raise SpecError(leaf_path(d), reason, "leave it out of the targets; `linear` means every leaf that can be adapted")
    return True


def _reason(d: Declared, weights: Mapping[str, Declared]) -> str | None:
    """Why a leaf cannot be adapted."""
    owner = d.weight.same_as
    if owner is not None and not weights[owner].weight.matmul:
        return f"is tied to {owner}, which is no linear leaf: merged, its adapter would also change that"
    return None


def _no_match(kind: AdapterKind, target: str, weights: Mapping[str, Declared]) -> SpecError:
    if target in weights or f"{target}.weight" in weights:
        role = (weights.get(target) or weights[f"{target}.weight"]).weight.role
        return SpecError(target, f"is no linear leaf (its role is {role})", "adapters change only linear leaves")
    paths = [leaf_path(d) for d in weights.values() if d.path.endswith(".weight") and d.weight.matmul]
    names = sorted({path.rpartition(".")[2] for path in paths})
    close = nearest(target, [*names, *paths])
    remedy = f"did you mean {' or '.join(close)}?" if close else f"leaves are called {', '.join(names)}; or `linear` for all"
    return SpecError(f"{kind.kind}.targets", f"{target!r} matches no linear leaf", remedy)


def _leaves(model: nn.Module, chosen: list[Declared]) -> Iterator[tuple[str, Linear]]:
    """(path, leaf) of the targeted leaves that this model holds."""
    absent = tuple(f"{path}." for path, module in model.named_modules() if isinstance(module, Absent))
    for d in chosen:
        path = leaf_path(d)
        if path.startswith(absent):
            continue
        leaf = model.get_submodule(path)
        if not isinstance(leaf, Linear):
            what = f"is a {type(leaf).__name__}, not a linear leaf of the model"
            raise SpecError(path, what, "remove what was put in its place")
        if any(isinstance(parameter, DTensor) for parameter in leaf.parameters()):
            raise SpecError(path, "is sharded over ranks already", "attach adapters before the model is sharded")
        yield path, leaf


def _made(kind: AdapterKind, d: Declared, leaf: Linear, seed: int, dtype: torch.dtype | None) -> AdapterModule:
    """The adapter of a leaf, on its device, with initial values unless that is meta."""
    stored = [*leaf.parameters(), *leaf.buffers()]
    device = stored[0].device
    own = dtype or leaf.storage.dense_dtype(leaf)  # of a quantized leaf, too: its scales may have fewer bits
    tensors = kind.declare(d)
    values = {
        tensor.weight.name: torch.empty(tensor.weight.shape(tensor.scope), dtype=own, device="meta")
        if device.type == "meta"
        else initial(tensor, seed).to(device, own)
        for tensor in tensors
    }
    return kind.adapter()(kind, tensors, values).train(leaf.training)


def match(model: nn.Module) -> None:
    """Set the adapters' parameters that follow from the weights (the lengths of DoRA); again after weights were loaded."""
    for _, leaf in _owners(model):
        if leaf.adapter is not None and not any(parameter.is_meta for parameter in leaf.parameters()):
            leaf.adapter.match(leaf)


def check_bare(model: nn.Module, own: Collection[Adapter] = ()) -> None:
    """Raise SpecError where a leaf has an adapter that is none of `own`: it would be lost."""
    for path, leaf in adapted_leaves(model):
        if leaf.adapter is not None and leaf.adapter not in own:
            raise SpecError(path, "has an adapter already", leaf.adapter.removed_by)


def _freeze(model: ModelModule) -> None:
    """Freeze the weights of a model, and remember which of them could be trained."""
    weights = dict(model.named_parameters())
    model.frozen_by_attach = frozenset(path for path, weight in weights.items() if weight.requires_grad)
    for weight in weights.values():
        weight.requires_grad_(False)


def detach(model: ModelModule) -> None:
    """Remove all adapters that `attach` made; the weights that it froze can be trained again."""
    leaves = list(adapted_leaves(model))
    check_bare(model, [leaf.adapter for _, leaf in leaves if isinstance(leaf.adapter, AdapterModule)])
    for _, leaf in leaves:
        leaf.adapter = None
    for path, weight in model.named_parameters():
        if path in model.frozen_by_attach:
            weight.requires_grad_(True)
    model.frozen_by_attach = frozenset()


class MergedWeights:
    """The weights that a merge replaced, and the adapters."""

    def __init__(self, model: ModelModule, old: list[tuple[Linear, Tensor, Tensor | None]], adapters: list[Any]) -> None:
        self.model, self.old, self.adapters = model, old, adapters

    @torch.no_grad()
    def undo(self) -> None:
        """Put the old weights back, which were kept and not recomputed: bit for bit; and the adapters."""
        for leaf, weight, bias in self.old:
            leaf.set_matrix(weight, bias)
        _freeze(self.model)
        for leaf, adapter in self.adapters:
            leaf.adapter = adapter
        self.old, self.adapters = [], []


@torch.no_grad()
def merge(model: ModelModule) -> MergedWeights:
    """Store the adapted matrix of every leaf as its weight, each once, and remove the adapters. The returned object keeps the
    old weights, and can undo it; drop it to free them."""
    old: list[tuple[Linear, Tensor, Tensor | None]] = []
    adapters = [(leaf, leaf.adapter) for _, leaf in adapted_leaves(model)]
    for _, leaf in list(_owners(model)):
        assert leaf.adapter is not None
        weight, bias = leaf.adapter.matrix(leaf), leaf.adapter.merged_bias(leaf)
        old.append((leaf, leaf.dense().clone(), None if leaf.bias is None else leaf.bias.clone()))
        leaf.set_matrix(weight, bias)
    detach(model)
    return MergedWeights(model, old, adapters)


def _owners(model: nn.Module) -> Iterator[tuple[str, Linear]]:
    """One leaf for each adapter, with its path."""
    known: set[int] = set()
    for path, leaf in adapted_leaves(model):
        if id(leaf.adapter) not in known:
            known.add(id(leaf.adapter))
            yield path, leaf


@torch.no_grad()
def merge_adapters(
    model: Transformer, attach: Sequence[Callable[[], object]], factors: Sequence[float], combined: Callable[..., Tensor]
) -> int:
    """Merge adapters, which the functions attach to the model one at a time, each by its factor; return the number of leaves
    that they changed. `combined` returns the change that several changes make together, of (changes, factors, path=…)."""
    changes: Changes = {}
    biases: Changes = {}
    leaves: dict[str, Linear] = {}
    for factor, attach_one in zip(factors, attach, strict=True):
        attach_one()
        _collect(model, factor, changes, biases, leaves)
        detach(model)
    for path, leaf in leaves.items():
        weight = leaf.dense() + combined(*_apart(changes[path]), path=path)
        own = biases.get(path)
        bias = leaf.bias if own is None else leaf.bias + combined(*_apart(own), path=f"{path}.bias")
        leaf.set_matrix(weight, bias)
    return len(leaves)


def _collect(model: Transformer, factor: float, changes: Changes, biases: Changes, leaves: dict[str, Linear]) -> None:
    """Take the change that each adapter of a model makes, once for each weight."""
    for path, leaf in _owners(model):
        adapter = leaf.adapter
        assert adapter is not None
        leaves[path] = leaf
        changes.setdefault(path, []).append((factor, adapter.matrix(leaf) - leaf.dense()))
        bias = adapter.merged_bias(leaf)
        if bias is not None and bias is not leaf.bias:
            biases.setdefault(path, []).append((factor, bias - leaf.bias))


def _apart(pairs: list[tuple[float, Tensor]]) -> tuple[list[Tensor], list[float]]:
    return [change for _, change in pairs], [factor for factor, _ in pairs]
