"""Blocks whose branches run side by side: they read the same input, and what each computes is added.

    hybrid_block    x ← x + f(norm x) + g(norm x)       f attention, g a state-space mixer; then the ffn
    expert_block    x ← x + f(norm x) + g(norm x)       after the mixer; f a dense ffn, g experts

The wire says where the norms are: `pre_norm` has one for both, `sandwich_norm` two for each. Every mixer has its own state.
Zuo et al. 2025 (Falcon-H1); Dong et al. 2024 (Hymba); Snowflake 2024 (Arctic, experts beside a dense ffn).
"""

from __future__ import annotations

from typing import ClassVar

from dovetail.core.group import Ffn, Mixer, Steps
from dovetail.core.part import child, register
from dovetail.model import Block


@register("hybrid_block")
class HybridBlock(Block):
    """Two mixers side by side, then an ffn (Falcon-H1)."""

    STEPS: ClassVar[Steps] = (("mixer", "ssm"), ("cross",), ("ffn",))

    ssm: Mixer = child("mamba2")


@register("expert_block")
class ExpertBlock(Block):
    """A mixer, then a dense ffn and experts side by side (Arctic)."""

    STEPS: ClassVar[Steps] = (("mixer",), ("cross",), ("ffn", "experts"))

    experts: Ffn = child("moe")
