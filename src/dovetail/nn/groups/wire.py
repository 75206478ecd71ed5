"""Wires: how the branches of a block join the residual stream (…, n, embed). Their base with scaling is in nn/block.py."""

from __future__ import annotations

from typing import ClassVar

from dovetail.spec.part import Part

Steps = tuple[tuple[str, ...], ...]  # the names of a block's branches, in order; those of one step read the same input


class Wire(Part):
    """How branches (mixer, cross, ffn) join the residual stream: where the norms are and what is added."""

    group: ClassVar[str] = "wire"

    sums: ClassVar[bool] = True  # whether the output is the input plus the branches, with nothing applied to the sum
    # fields that only say how many norms there are: without effect where a norm has no weights, and several are one
    counts_norms: ClassVar[frozenset[str]] = frozenset()
    of_first_norm: ClassVar[frozenset[str]] = frozenset()  # those that say whether the first branch has a norm

    def norms(self, steps: Steps) -> tuple[str, ...]:
        """Names of the norm modules of a block."""
        raise NotImplementedError

    def rescales(self) -> bool:
        """Whether it multiplies the residual stream behind the last branch."""
        return False

    def streams(self) -> int:
        """The number of residual streams. Blocks with several that follow each other share them: the first opens them, the
        last closes them."""
        return 1
