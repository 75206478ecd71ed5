"""Layout: how the ranks of a run share its work. Plain data, no torch.

    ranks = pipeline × replicas × shards × sequence × tensor         tensor-parallel ranks, which communicate most, are adjacent

    pipeline   each rank has some of the layers; activations go from one to the next                     Huang et al. 2019
    replicas   each group of ranks has other rows, and a whole copy of the weights                       DDP; with shards, HSDP
    shards     each rank has other rows, and a slice of every weight, gathered for use                   FSDP, ZeRO-3
    sequence   each rank has another chunk of every row; with `ring`, keys and values go round           Li et al. 2021
    tensor     each rank has other heads, hidden units, experts, and rows of the vocabulary              Shoeybi et al. 2019

Weights are sharded over shards × sequence: the ranks of a sequence compute with all weights, too.
"""

from __future__ import annotations

import dataclasses as dc
from typing import TypedDict

from dovetail.base.errors import UsageError


class Axes(TypedDict, total=False):
    """What is said of a layout beside the number of ranks."""

    shards: int | None
    sequence: int
    tensor: int
    pipeline: int
    ring: bool


@dc.dataclass(frozen=True)
class Layout:
    """The number of ranks along each axis, and whether keys and values of a split sequence go round them (parallel/ring.py) or
    are gathered."""

    pipeline: int = 1
    replicas: int = 1
    shards: int = 1
    sequence: int = 1
    tensor: int = 1
    ring: bool = False

    def __str__(self) -> str:
        """`tensor 8 × shards 128 × pipeline 16`: the axes with several ranks."""
        names = ("tensor", "sequence", "shards", "replicas", "pipeline")
        sizes = [f"{name} {size}" for name in names if (size := getattr(self, name)) > 1]
        return " × ".join(sizes) or "one rank"

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.pipeline * self.replicas * self.shards * self.sequence * self.tensor

    @property
    def data(self) -> int:
        """The number of shares of a batch's rows."""
        return self.replicas * self.shards

    def share(self, rank: int) -> int:
        """Which share of a batch's rows a rank reads."""
        return rank // (self.sequence * self.tensor) % self.data

    @staticmethod
    def of(
        ranks: int,
        *,
        shards: int | None = None,
        sequence: int = 1,
        tensor: int = 1,
        pipeline: int = 1,
        ring: bool = False,
    ) -> Layout:
        """The layout of so many ranks: those that no other axis takes have rows of their own; `shards` of them, by default all,
        share a copy of the weights. Raise UsageError, which names the flag, where a number does not divide what is left."""
        left = ranks
        for flag, size in {"tensor": tensor, "sequence": sequence, "pipeline": pipeline}.items():
            left = _divided(left, size, flag, ranks)
        shards = left if shards is None else shards
        return Layout(pipeline, _divided(left, shards, "shards", ranks), shards, sequence, tensor, ring)


def _divided(left: int, size: int, flag: str, ranks: int) -> int:
    if size < 1 or left % size:
        processes = "one process" if ranks == 1 else f"{ranks} processes"
        beside = "" if left == ranks else f", of which {ranks // left} share the work of one"
        raise UsageError(f"--{flag}: {size} does not divide {processes}{beside}; start a multiple of {size} with torchrun")
    return left // size
