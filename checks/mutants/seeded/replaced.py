"""Seeded bugs of linear leaves: a path that reads the stored weight instead of calling the leaf, and fused leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from dovetail.nn import linear
from dovetail.nn.linear import Dense
from dovetail.parts.ffn import dense
from dovetail.parts.ffn.moe import BankModule
from dovetail.parts.ffn.router import TopKModule
from dovetail.parts.head import LmModule
from dovetail.parts.mixer import mla
from dovetail.parts.mixer.attention import AttentionModule
from dovetail.proof.laws.mutant import Mutant, instead, spec

_multiply_fused = linear.multiply_fused


def reading_the_weight(method: Callable[..., Any], *names: str) -> Callable[..., Any]:
    """A method of a module that takes the stored weights of these leaves."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        leaves: list[Any] = [self.get_submodule(name) for name in names]
        storages = [leaf.storage for leaf in leaves]
        for leaf in leaves:
            leaf.storage = Dense()
        try:
            return method(self, *args, **kwargs)
        finally:
            for leaf, storage in zip(leaves, storages, strict=True):
                leaf.storage = storage

    return call


class Unchanged(tuple[int, ...]):
    """Addresses that never differ from those before."""

    __slots__ = ()
    __hash__ = tuple.__hash__

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False


def unchanged_addresses(leaves: Sequence[Any]) -> tuple[int, ...]:
    return Unchanged()


def exchanged(x: Tensor, ctx: Any, fused: Any, *leaves: Any) -> Sequence[Tensor]:
    outputs = _multiply_fused(x, ctx, fused, *leaves)
    return outputs if fused is None else outputs[::-1]


def any_matrix(*_: Any) -> bool:
    return True


def mutants() -> list[Mutant]:
    """The seeded bugs of this area."""
    experts = spec().set("layers.*.ffn", {"kind": "moe", "experts": 4, "hidden": 20})
    latent = spec().set("layers.*.mixer", {"kind": "mla", "heads": 6, "kv_rank": 5, "nope": 6, "rope": 8, "value": 7})
    tied = spec().set("head.tied", True)

    def forgotten(name: str, owner: Any, method: str, model: Any, *leaves: str) -> Mutant:
        return Mutant(name, "replaced", instead(owner, method, reading_the_weight(getattr(owner, method), *leaves)), model)

    return [
        forgotten("a head multiplies by the embedding's table", LmModule, "logits", tied, "out"),
        forgotten("experts multiply by the stored matrices", BankModule, "forward", experts, "up"),
        forgotten("a router multiplies by its stored matrix", TopKModule, "forward", experts, "out"),
        forgotten("absorbed MLA reads the stored k_up", mla.MLAModule, "absorbed", latent, "k_up"),
        forgotten("attention reads the stored v", AttentionModule, "forward", spec(), "v"),
        Mutant(
            "fused leaves keep the weights they were joined with", "fast", instead(linear, "addresses", unchanged_addresses)
        ),
        Mutant("fused leaves are split in another order", "fast", instead(dense, "multiply_fused", exchanged)),
        Mutant("absorbed MLA takes a matrix that is not exact", "replaced", instead(mla, "offers", any_matrix), latent),
    ]
