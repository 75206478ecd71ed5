"""Seeded bugs of blocks whose branches run side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dovetail.files.spec import from_yaml
from dovetail.nn.block import Branching, WireModule
from dovetail.nn.ctx import Ctx
from dovetail.parts.block import HybridBlock
from dovetail.parts.ffn.moe import DenseAndExpertsModule
from dovetail.proof.laws.mutant import Mutant, instead
from dovetail.proof.laws.suite import OWN_NUMBER

HYBRID = """
width: 28
vocab: 62
layers:
- repeat: 2
  kind: hybrid_block
  mixer: {heads: 6, kv_heads: 2, head: 12}
  ssm: {kind: attention, heads: 6, kv_heads: 2, head: 12, mask: [causal, {kind: window, size: 3}]}
  ffn: {hidden: 44}
"""

SCALED = """
width: 28
vocab: 62
layers: [{repeat: 2, wire: {stream_scale: true}, mixer: {heads: 6, kv_heads: 2, head: 12}, ffn: {hidden: 44}}]
"""

BESIDE = """
width: 28
vocab: 62
layers:
- repeat: 2
  mixer: {heads: 6, kv_heads: 2, head: 12}
  ffn: {kind: dense_and_experts, dense: {hidden: 44}, experts: {experts: 4, hidden: 20, norm: rmsnorm}}
"""

_branch, _multipliers = Branching.branch, HybridBlock.multipliers


def one_after_the_other(
    self: WireModule, block: Branching, step: tuple[str, ...], x: Tensor, ctx: Ctx, views: Mapping[str, Any]
) -> Tensor:
    total = self.added(block.branch(step[0], x, ctx, views), block, step[0], ctx)
    for name in step[1:]:
        total = total + self.added(block.branch(name, x + total, ctx, views), block, name, ctx)
    return total


def first_alone(
    self: WireModule, block: Branching, step: tuple[str, ...], x: Tensor, ctx: Ctx, views: Mapping[str, Any]
) -> Tensor:
    return self.added(block.branch(step[0], x, ctx, views), block, step[0], ctx)


def one_cache(self: Branching, name: str, x: Tensor, ctx: Ctx, views: Mapping[str, Any], **values: Any) -> Tensor:
    return _branch(self, name, x, ctx, dict.fromkeys(views, views.get("mixer")), **values)


def behind_instead_of_before(self: HybridBlock) -> dict[str, tuple[float, float]]:
    return {name: (after, before) for name, (before, after) in _multipliers(self).items()}


def stream_not_scaled(self: WireModule, x: Tensor) -> Tensor:
    return x


def sum_not_normed(self: DenseAndExpertsModule, x: Tensor, ctx: Ctx) -> Tensor:
    dense = self.dense_post_norm(self.dense(self.dense_norm(x, ctx), ctx), ctx)
    return ctx.tap(self, "out", dense + self.experts_post_norm(self.experts(x, ctx), ctx))


def mutants() -> list[Mutant]:
    """The seeded bugs of this area."""
    hybrid = from_yaml(HYBRID)
    return [
        Mutant(
            "the second mixer reads what the first has added",
            OWN_NUMBER,
            instead(WireModule, "sum", one_after_the_other),
            hybrid,
        ),
        Mutant("a branch beside another is forgotten", "every_weight", instead(WireModule, "sum", first_alone), hybrid),
        Mutant(
            "a factor of what a branch reads multiplies what it returns",
            OWN_NUMBER,
            instead(HybridBlock, "multipliers", behind_instead_of_before),
            hybrid.set("layers.*.ssm_in", 0.5),
        ),
        Mutant(
            "the residual stream is not scaled",
            OWN_NUMBER,
            instead(WireModule, "rescaled", stream_not_scaled),
            from_yaml(SCALED),
        ),
        Mutant(
            "the sum of a dense ffn and experts is not normed",
            "every_weight",
            instead(DenseAndExpertsModule, "forward", sum_not_normed),
            from_yaml(BESIDE),
        ),
        Mutant("two mixers of a block write to one cache", "chunked", instead(Branching, "branch", one_cache), hybrid),
    ]
