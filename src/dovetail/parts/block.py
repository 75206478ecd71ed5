"""Blocks whose branches run side by side: they read the same input, and what each computes is added.

    hybrid_block    x ← x + f(norm x) + g(norm x)       f attention, g a state-space mixer; then the ffn
    expert_block    x ← x + f(norm x) + g(norm x)       after the mixer; f a dense ffn, g experts

The wire says where the norms are: `pre_norm` has one for both, `sandwich_norm` two for each. Every mixer has its own state.
The branches of a hybrid_block may have fixed factors before and behind them, a · f(b · x), as µP asks for where widths differ.
Zuo et al. 2025 (Falcon-H1); Dong et al. 2024 (Hymba); Snowflake 2024 (Arctic, experts beside a dense ffn).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from dovetail.nn.block import Block, BlockModule, BlockProof
from dovetail.nn.cross_layer import Values
from dovetail.nn.ctx import Ctx
from dovetail.nn.groups import Ffn, Mixer, Steps
from dovetail.spec.field import MAX_FACTOR, bounded
from dovetail.spec.part import child, register
from dovetail.spec.scope import Scope

FACTORS = {"mixer_in": 0.6, "mixer_out": 1.3, "ssm_in": 1.5, "ssm_out": 0.7, "ffn_out": 0.8}  # fields, with a sample of each


@register("hybrid_block")
class HybridBlock(Block):
    """Two mixers side by side, then an ffn (Falcon-H1)."""

    STEPS: ClassVar[Steps] = (("mixer", "ssm"), ("cross",), ("ffn",))

    ssm: Mixer = child("mamba2")
    mixer_in: float = bounded(1.0, above=0, at_most=MAX_FACTOR)  # multiplies what the mixer reads
    mixer_out: float = bounded(1.0, above=0, at_most=MAX_FACTOR)  # multiplies what it returns
    ssm_in: float = bounded(1.0, above=0, at_most=MAX_FACTOR)
    ssm_out: float = bounded(1.0, above=0, at_most=MAX_FACTOR)
    ffn_out: float = bounded(1.0, above=0, at_most=MAX_FACTOR)

    def multipliers(self) -> dict[str, tuple[float, float]]:
        return {"mixer": (self.mixer_in, self.mixer_out), "ssm": (self.ssm_in, self.ssm_out), "ffn": (1.0, self.ffn_out)}


class HybridBlockProof(BlockProof, of=HybridBlock):
    """Sampled values and idle fields."""

    samples = {**BlockProof.samples, **{name: [1.0, other] for name, other in FACTORS.items()}}

    def idle(self, part: Block, scope: Scope) -> frozenset[str]:
        return super().idle(part, scope) | {name for name in FACTORS if name.partition("_")[0] not in part.branches()}


class HybridBlockModule(BlockModule, of=HybridBlock):
    """As any block, with factors around its branches."""

    def setup(self) -> None:
        super().setup()
        self.multipliers = self.part.multipliers()

    def branch(self, name: str, x: Tensor, ctx: Ctx, views: Mapping[str, Any], **values: Values) -> Tensor:
        before, after = self.multipliers.get(name, (1.0, 1.0))
        y = super().branch(name, x if before == 1.0 else x * before, ctx, views, **values)
        return y if after == 1.0 else y * after


@register("expert_block")
class ExpertBlock(Block):
    """A mixer, then a dense ffn and experts side by side (Arctic)."""

    STEPS: ClassVar[Steps] = (("mixer",), ("cross",), ("ffn", "experts"))

    experts: Ffn = child("moe")
