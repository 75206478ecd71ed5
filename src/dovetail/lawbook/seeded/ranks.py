"""Seeded bugs of sharding: biases added per rank, gradients not reduced, sequence pieces in the wrong order, masks and batch
statistics of one rank alone."""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dovetail.core.ctx import Ctx, _pairs
from dovetail.core.layout import TokenLayout
from dovetail.core.module import Module
from dovetail.core.random import draw
from dovetail.dist import batch, collective, context, shard
from dovetail.dist.batch import TokenRanks
from dovetail.lawbook.seeded.bug import Mutant, instead, spec
from dovetail.lawbook.seeded.moe import experts

_reader, _gather, _split_rows = shard._reader, collective.gather, TokenLayout.split_rows


def bias_added_on_every_rank(d: Any, *where: Any) -> Any:
    auto = d._replace(weight=dc.replace(d.weight, tp="auto")) if d.weight.tp == "once" else d
    return _reader(auto, *where)


def gradient_of_one_rank(x: Tensor, group: Any) -> Tensor:
    return x


def pieces_in_reverse(x: Tensor, dim: int, group: Any) -> Tensor:
    return torch.cat(list(_gather(x, dim, group).chunk(2, dim))[::-1], dim)


def channels_counted_per_rank(self: Ctx, module: Module, axes: Sequence[str], size: int) -> int:
    return 0


def samples_counted_per_rank(self: TokenLayout, parts: int, which: int) -> TokenLayout:
    rows = _split_rows(self, parts, which)
    return rows.numbered(-int(rows.sample.min()))


def positions_counted_per_rank(self: Ctx, x: Tensor, module: Module, name: str, axes: Sequence[str]) -> Tensor:
    position = torch.arange(x.shape[-2]).expand(x.shape[:-1])
    pairs = _pairs(self.first(module, axes, x.shape[-1]), x.shape[-1], x.device)
    return draw(self._stream(module, name), self.layout.sample[..., None], position[..., None], pairs)


def sum_of_one_rank(self: TokenRanks, x: Tensor) -> Tensor:
    return x


def sum_without_gradients_of_others(x: Tensor, group: Any) -> Tensor:
    return collective.leave(x, group)


def counts_of_one_rank(self: TokenRanks, counts: Tensor) -> tuple[Tensor, Tensor]:
    return counts.cumsum(0) - counts, counts.sum(0)


def counts_rank_by_rank(self: TokenRanks, counts: Tensor) -> tuple[Tensor, Tensor]:
    group = self.sequence or self.data
    earlier, total = batch._scan(counts.sum(0), group)
    return earlier + (counts.cumsum(0) - counts), total


def mutants() -> list[Mutant]:
    """The seeded bugs of this area."""
    biased, dropping = spec(bias=True, out_bias=True), spec(dropout=0.2).set("layers.*.ffn.dropout", 0.2)
    balanced, limited = experts(balance_loss=0.5), experts(capacity=0.4)
    return [
        Mutant("a bias is added once per rank", "sharded", instead(shard, "_reader", bias_added_on_every_rank), biased),
        Mutant("a gradient is not summed across ranks", "sharded", instead(shard, "enter", gradient_of_one_rank)),
        Mutant("pieces of a sequence are joined in reverse", "sharded", instead(context, "gather", pieces_in_reverse)),
        Mutant("every rank drops the same channels", "sharded", instead(Ctx, "first", channels_counted_per_rank), dropping),
        Mutant(
            "every rank drops the same samples",
            "sharded",
            instead(TokenLayout, "split_rows", samples_counted_per_rank),
            dropping,
        ),
        Mutant("pieces of a sequence drop alike", "sharded", instead(Ctx, "_bits", positions_counted_per_rank), dropping),
        Mutant("a balance loss counts one rank's tokens", "sharded", instead(TokenRanks, "sum", sum_of_one_rank), balanced),
        Mutant(
            "a balance loss learns from one rank's tokens",
            "sharded",
            instead(batch, "total", sum_without_gradients_of_others),
            balanced,
        ),
        Mutant("a rank fills experts by itself", "sharded", instead(TokenRanks, "counts", counts_of_one_rank), limited),
        Mutant("experts are filled rank by rank", "sharded", instead(TokenRanks, "counts", counts_rank_by_rank), limited),
    ]
