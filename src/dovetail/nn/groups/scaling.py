"""Scalings of rotary frequencies (pairs,) for longer contexts."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from dovetail.spec.part import Part
from dovetail.spec.part_proof import FieldCause, Proof


class Scaling(Part):
    """Scales rotary frequencies for longer contexts. No module: the frequencies are constants of RoPE."""

    group: ClassVar[str] = "scaling"

    varies: ClassVar[bool] = False  # whether frequencies depend on the current length of the sequence

    def frequencies(self, plain: Tensor, base: float) -> Tensor:
        """(pairs,) scaled angular frequencies, from the plain ones, base^(−i/pairs)."""
        raise NotImplementedError

    def at_length(self, plain: Tensor, base: float, length: Tensor) -> Tensor:
        """(…, pairs) frequencies for sequences whose current lengths are `length` (…); called only where `varies`."""
        raise NotImplementedError

    def limit(self) -> int | None:
        """The context length in tokens before scaling; None where the scaling has no such field."""
        return None

    def amplitude(self) -> float:
        """The factor of cos and sin (the attention factor of YaRN and LongRoPE)."""
        return 1.0


WRONG_SCALING = FieldCause("rope scaling")  # any field of any scaling


class ScalingProof(Proof, of=Scaling):
    """Causes."""

    causes = {"*": WRONG_SCALING}
