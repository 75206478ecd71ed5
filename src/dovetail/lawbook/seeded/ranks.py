"""Seeded bugs of sharding: biases added per rank, gradients not reduced, sequence pieces in the wrong order."""

from __future__ import annotations

import dataclasses as dc
from typing import Any

import torch
from torch import Tensor

from dovetail.dist import collective, context, shard
from dovetail.lawbook.seeded.bug import Mutant, instead, spec

_reader, _gather = shard._reader, collective.gather


def bias_added_on_every_rank(d: Any, *where: Any) -> Any:
    auto = d._replace(weight=dc.replace(d.weight, tp="auto")) if d.weight.tp == "once" else d
    return _reader(auto, *where)


def gradient_of_one_rank(x: Tensor, group: Any) -> Tensor:
    return x


def pieces_in_reverse(x: Tensor, dim: int, group: Any) -> Tensor:
    return torch.cat(list(_gather(x, dim, group).chunk(2, dim))[::-1], dim)


def mutants() -> list[Mutant]:
    """The seeded bugs of this area."""
    biased = spec(bias=True, out_bias=True)
    return [
        Mutant("a bias is added once per rank", "sharded", instead(shard, "_reader", bias_added_on_every_rank), biased),
        Mutant("a gradient is not summed across ranks", "sharded", instead(shard, "enter", gradient_of_one_rank)),
        Mutant("pieces of a sequence are joined in reverse", "sharded", instead(context, "gather", pieces_in_reverse)),
    ]
