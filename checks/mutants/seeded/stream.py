"""Seeded bugs of blocks with several residual streams."""

from __future__ import annotations

from torch import Tensor

from dovetail.nn.ctx import Ctx
from dovetail.parts.mhc import MhcModule
from dovetail.proof.laws.mutant import Mutant, instead, spec
from dovetail.proof.laws.suite import OWN_NUMBER

_sinkhorn, _open = MhcModule.sinkhorn, MhcModule.open


def transposed(self: MhcModule, k: Tensor) -> Tensor:
    return _sinkhorn(self, k).transpose(-1, -2)


def mean_at_the_end(self: MhcModule, x: Tensor, ctx: Ctx | None = None) -> Tensor:
    return x.mean(-2)


def zeros_but_one(self: MhcModule, x: Tensor) -> Tensor:
    wide = _open(self, x).clone()
    wide[..., 1:, :] = 0.0
    return wide


def mutants() -> list[Mutant]:
    """The seeded bugs of this area."""
    streams = spec().set("layers.*.wire", {"kind": "mhc", "count": 3})
    return [
        Mutant(
            "streams are mixed by the matrix, not by its transpose",
            OWN_NUMBER,
            instead(MhcModule, "sinkhorn", transposed),
            streams,
            report="Megatron-LM#4957",
        ),
        Mutant(
            "the last block takes the mean of its streams",
            "every_weight",
            instead(MhcModule, "close", mean_at_the_end),
            streams,
        ),
        Mutant("all streams but one begin as zeros", OWN_NUMBER, instead(MhcModule, "open", zeros_but_one), streams),
    ]
