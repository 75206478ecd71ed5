"""Seeded bugs of multi-head latent attention: the rotated key, latents under tensor parallel, and the absorbed form."""

from __future__ import annotations

import dataclasses as dc
from typing import Any

import torch
from torch import Tensor

from dovetail.model.model import Model
from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout
from dovetail.parts.mixer.mla import MLA, MLAModule
from dovetail.proof.laws.mutant import Mutant, instead, spec
from dovetail.proof.laws.suite import OWN_NUMBER
from dovetail.spec.scope import Scope
from dovetail.spec.weight import State

_absorbed, _expanded, _queries, _setup = (
    MLAModule.absorbed,
    MLAModule.expanded,
    MLAModule.queries,
    MLAModule.setup,
)
_state = MLA.state


def scale_of_the_latent(self: MLAModule, q: Tensor, *rest: Any) -> Tensor:
    return _absorbed(self, q * (self.qk_head / (self.part.kv_rank + self.part.rope)) ** 0.5, *rest)


def rotated_key_dropped(self: MLAModule, q: Tensor, latent: Tensor, turned: Tensor, *rest: Any) -> Tensor:
    return _absorbed(self, q, latent, torch.zeros_like(turned), *rest)


def values_of_other_heads(self: MLAModule, *given: Any) -> Tensor:
    return _absorbed(self, *given).flip(-2)


def rotated_again(
    self: MLAModule, q: Tensor, latent: Tensor, turned: Tensor, layout: TokenLayout, key_layout: TokenLayout, ctx: Ctx
) -> Tensor:
    turned = turned if key_layout is layout else self.position.rotate(turned, key_layout)
    return _expanded(self, q, latent, turned, layout, key_layout, ctx)


def query_latent_not_normalized(self: MLAModule, x: Tensor, ctx: Ctx) -> Tensor:
    q_nope, q_rope = (
        self.q(self.q_down(x, ctx), ctx).unflatten(-1, (-1, self.qk_head)).split([self.part.nope, self.part.rope], -1)
    )
    return torch.cat([q_nope, self.position.rotate(q_rope, ctx.layout)], -1)


def counted_from_the_call(self: MLAModule, x: Tensor, ctx: Ctx) -> Tensor:
    order = torch.arange(ctx.layout.n).expand_as(ctx.layout.order)
    return _queries(self, x, dc.replace(ctx, layout=TokenLayout.of(order, ctx.layout.seg, ctx.layout.row)))


def scale_of_nope(self: MLAModule) -> None:
    _setup(self)
    self.scale = self.part.nope**-0.5


def a_latent_for_each_head(self: MLA, scope: Scope) -> list[State]:
    return [dc.replace(state, copies=self.heads) for state in _state(self, scope)]


def latents_are_summed(
    self: MLAModule, q: Tensor, latent: Tensor, turned: Tensor, layout: TokenLayout, key_layout: TokenLayout, ctx: Ctx
) -> Tensor:
    return _expanded(self, q, ctx.ranks.all_reduce(latent, ("heads",)), turned, layout, key_layout, ctx)


def latent(kv_rank: int) -> Model:
    """Two layers of latent attention."""
    sizes = {"heads": 6, "kv_rank": kv_rank, "q_rank": 14, "nope": 9, "rope": 8, "value": 7}
    return spec().set("layers.*.mixer", {"kind": "mla", **sizes})


def mutants() -> list[Mutant]:
    """The seeded bugs of this area. With a small latent the absorbed form always runs, with a large one only in decoding."""
    small, large = latent(5), latent(10)

    def absorbing(name: str, law: str, new: Any, model: Model) -> Mutant:
        return Mutant(name, law, instead(MLAModule, "absorbed", new), model)

    return [
        absorbing("the absorbed form scales by the size of the latent", "fast", scale_of_the_latent, small),
        absorbing("the absorbed form drops the rotated key", "chunked", rotated_key_dropped, large),
        absorbing("the absorbed form exchanges the values of heads", "chunked", values_of_other_heads, large),
        Mutant("a cached key is rotated again", "chunked", instead(MLAModule, "expanded", rotated_again), large),
        Mutant(
            "query positions count from the start of the call",
            "chunked",
            instead(MLAModule, "queries", counted_from_the_call),
            large,
        ),
        Mutant(
            "the latent of queries is not normalized",
            "every_weight",
            instead(MLAModule, "queries", query_latent_not_normalized),
            large,
        ),
        Mutant(
            "the scale ignores the rotated channels",
            OWN_NUMBER,
            instead(MLAModule, "setup", scale_of_nope),
            large,
        ),
        Mutant("a latent is cached for each head", OWN_NUMBER, instead(MLA, "state", a_latent_for_each_head), large),
        Mutant(
            "a replicated latent is summed over ranks",
            "sharded",
            instead(MLAModule, "expanded", latents_are_summed),
            large,
        ),
    ]
