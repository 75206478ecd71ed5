"""Seeded bugs of linear leaves: a path that reads the stored weight instead of calling the leaf, and joined leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from dovetail.core import linear
from dovetail.parts.ffn import dense
from dovetail.parts.ffn.moe import BankModule
from dovetail.parts.ffn.router import TopKModule
from dovetail.parts.head import LmModule
from dovetail.parts.mixer import mla
from dovetail.parts.mixer.attention import AttentionModule
from dovetail.proof.laws.mutant import Mutant, instead, spec

_together = linear.together


def stored(leaf: nn.Module) -> nn.Module:
    """The leaf that holds the stored weight: a replaced leaf has it inside."""
    return next((inside for inside in leaf.children()), leaf)


def reading_the_weight(method: Callable[..., Any], *names: str) -> Callable[..., Any]:
    """A method of a module that takes the stored weights of these leaves."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        leaves = {name: self.get_submodule(name) for name in names}
        for name, leaf in leaves.items():
            self.add_module(name, stored(leaf))
        try:
            return method(self, *args, **kwargs)
        finally:
            for name, leaf in leaves.items():
                self.add_module(name, leaf)

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


def exchanged(x: Tensor, joint: Any, *leaves: Any) -> Sequence[Tensor]:
    outputs = _together(x, joint, *leaves)
    return outputs if joint is None else outputs[::-1]


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
            "joined leaves keep the weights they were joined with", "fast", instead(linear, "addresses", unchanged_addresses)
        ),
        Mutant("joined leaves are split in another order", "fast", instead(dense, "together", exchanged)),
        Mutant("absorbed MLA takes a matrix that is not exact", "replaced", instead(mla, "offers", any_matrix), latent),
    ]
