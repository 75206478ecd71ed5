"""Seeded bugs of adapters: each way in which an adapter silently does nothing, or something else."""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dovetail.nn import declared_tensors as holding, linear
from dovetail.nn.ctx import Ctx
from dovetail.nn.linear import Linear, Rows
from dovetail.parts.ffn.dense import MlpModule
from dovetail.parts.mixer.mla import MLAModule
from dovetail.proof.laws import adapted as law
from dovetail.proof.laws.mutant import Mutant, instead, spec
from dovetail.spec.fold import Declared
from dovetail.spec.weight import Weight
from dovetail.weights.adapters import attach as attaching, multi_lora
from dovetail.weights.adapters.attach import merge
from dovetail.weights.adapters.ia3 import Ia3Module
from dovetail.weights.adapters.lora import DoraModule, Lora, LoraModule
from dovetail.weights.adapters.multi_lora import Chosen, Factors

_leaves, _tensors, _adapted = attaching._leaves, Lora.tensors, holding.adapted_leaves
_rows_of = Chosen.of


def without_adapters(method: Callable[..., Any], *names: str) -> Callable[..., Any]:
    """A method of a module in which these leaves have no adapter."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        kept = {name: self.get_submodule(name).adapter for name in names}
        for name in names:
            self.get_submodule(name).adapter = None  # type: ignore[assignment]
        try:
            return method(self, *args, **kwargs)
        finally:
            for name, adapter in kept.items():
                self.get_submodule(name).adapter = adapter  # type: ignore[assignment]

    return call


def experts_left_out(model: nn.Module, chosen: list[Declared]) -> Iterator[tuple[str, Linear]]:
    return _leaves(model, [d for d in chosen if not d.weight.batch])


def grouped_by_base(self: LoraModule, leaf: Linear, x: Tensor, rows: Rows, ctx: Ctx | None) -> Tensor:
    return leaf.storage.grouped(leaf, x, rows, ctx)


def joined_all_the_same(leaf: nn.Module) -> bool:
    return type(leaf) is Linear


def both_zero(self: Lora, base: Declared) -> list[Weight]:
    return [dc.replace(w, init="zeros") for w in _tensors(self, base)]


def base_trained(model: Any, adapter: Any, **how: Any) -> Any:
    applied = _attach(model, adapter, **how)
    for path, parameter in model.named_parameters():
        parameter.requires_grad_(".adapter." not in path)
    return applied


_attach = attaching.attach


def one_layer_held(model: nn.Module) -> Iterator[tuple[str, Linear]]:
    return ((path, leaf) for path, leaf in _adapted(model) if not path.startswith("layers.1."))


def saved_without_b(model: nn.Module, tensors: Any) -> None:
    own = law.adapter_tensors(model)
    _set(model, {path: own[path] if path.endswith(".b") else tensor for path, tensor in tensors.items()})


_set = law.set_adapter


def merged_twice(model: Any) -> None:
    adapters = [(leaf, leaf.adapter) for _, leaf in _adapted(model)]
    merge(model)
    for leaf, adapter in adapters:
        leaf.adapter = adapter
    merge(model)


def merged_by_path(model: nn.Module) -> Iterator[tuple[str, Linear]]:
    return _adapted(model)


def scale_forgotten(self: LoraModule, leaf: Linear) -> Tensor:
    return self.b @ self.a


def bias_not_scaled(self: Ia3Module, leaf: Linear) -> Tensor | None:
    return leaf.bias


def dropped_always(self: LoraModule, leaf: Linear, x: Tensor, ctx: Ctx | None, rows: Rows | None = None) -> Tensor:
    return torch.where(torch.arange(x.shape[-1], device=x.device) % 2 == 0, 2 * x, 0.0)


def next_rows_adapter(self: Chosen, rows: int, path: str) -> Tensor:
    return _rows_of(self, rows, path).roll(1)


def padded_at_two_ends(one: Factors, rank: int) -> Factors:
    more = rank - one.a.shape[-2]
    return Factors(F.pad(one.a, (0, 0, 0, more)), F.pad(one.b, (more, 0)))


def ctx_not_passed_on(self: MlpModule, x: Tensor, ctx: Ctx) -> Tensor:
    return self.down(self.act(self.up(x)), ctx)


def mutants() -> list[Mutant]:
    """The seeded bugs of this area."""
    experts = spec().set("layers.*.ffn", {"kind": "moe", "experts": 4, "hidden": 20})
    latent = spec().set("layers.*.mixer", {"kind": "mla", "heads": 6, "kv_rank": 5, "nope": 6, "rope": 8, "value": 7})
    shared = spec().set("layers.1.shares", 0)
    plain = spec().set("layers.*.ffn", {"kind": "mlp", "hidden": 44})
    biased = spec().set("layers.*.mixer.bias", True)

    def bug(name: str, owner: Any, attribute: str, new: Any, model: Any = None, report: str = "") -> Mutant:
        return Mutant(name, "adapted", instead(owner, attribute, new), model or spec(), report)

    absorbed = without_adapters(MLAModule.absorbed, "k_up", "v_up")
    return [
        bug("adapters are not attached to experts", attaching, "_leaves", experts_left_out, experts, "verl#7285"),
        bug("experts are multiplied without their adapter", LoraModule, "grouped", grouped_by_base, experts),
        bug("absorbed MLA takes the matrices of the base", MLAModule, "absorbed", absorbed, latent),
        bug("fused leaves are multiplied without their adapters", linear, "_bare", joined_all_the_same),
        bug("both factors of an adapter begin as zeros", Lora, "tensors", both_zero),
        bug("the base takes gradients, and the adapter none", law, "attach", base_trained),
        bug("the optimizer is not given the adapters of a layer", holding, "adapted_leaves", one_layer_held),
        bug("a factor of the adapter is lost when it is saved", law, "set_adapter", saved_without_b),
        bug("an adapter is merged twice", law, "merge", merged_twice),
        bug("a weight that two layers share is merged twice", attaching, "_owners", merged_by_path, shared),
        bug("a merge forgets the scale", LoraModule, "delta", scale_forgotten),
        bug("a merge of (IA)³ leaves the bias as it is", Ia3Module, "merged_bias", bias_not_scaled, biased),
        bug("a merge of DoRA forgets the lengths", DoraModule, "matrix", LoraModule.matrix),
        bug("the dropout of an adapter stays on in evaluation", LoraModule, "dropped", dropped_always),
        bug("a part calls its leaf without the ctx", MlpModule, "forward", ctx_not_passed_on, plain),
        bug("a row has the adapter of the row before it", Chosen, "of", next_rows_adapter),
        bug("the factors of a lower rank are padded at two ends", multi_lora, "_padded", padded_at_two_ends),
    ]
