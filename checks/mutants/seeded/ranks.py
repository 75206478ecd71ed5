"""Seeded bugs of sharding: biases added per rank, gradients not reduced, sequence pieces in the wrong order, masks, losses and
batch statistics of one rank alone, weights initialized at another rank's offset, chunks of a ring merged, masked or dropped
wrongly, gradients that end where a pipeline is cut, and adapters that are sharded or dropped as on one rank."""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from checks.mutants.seeded.moe import experts
from dovetail.nn.ctx import Ctx
from dovetail.nn.draws import Draws, _pairs
from dovetail.nn.layout import TokenLayout
from dovetail.nn.loss import LossSum
from dovetail.nn.module import Module
from dovetail.nn.random import draw
from dovetail.nn.ranks import Ranks
from dovetail.ops import vocab
from dovetail.ops.attend_tiled import Work
from dovetail.ops.tiles import KeyPiece
from dovetail.parallel import collective, construction, context, ring, shard, stage
from dovetail.parallel.context import TokenRanks
from dovetail.parallel.ring import RingView
from dovetail.parallel.shard import TensorRanks
from dovetail.parts import head
from dovetail.proof.laws.mutant import Mutant, instead, spec
from dovetail.spec.fold import Declared
from dovetail.weights.adapters import lora
from dovetail.weights.adapters.kind import Tp
from dovetail.weights.adapters.lora import InputDropout

_local_slices, _first = construction.local_slices, Ranks.first
_reader, _gather, _split_rows = shard._reader, collective.gather, TokenLayout.split_rows
_chunk_layouts, _factor, _staged = RingView.chunk_layouts, Work.factor, stage._forward
_drop = InputDropout.drop


def bias_added_on_every_rank(d: Any, *where: Any) -> Any:
    auto = d._replace(weight=dc.replace(d.weight, tp="auto")) if d.weight.tp == "once" else d
    return _reader(auto, *where)


def gradient_of_one_rank(x: Tensor, group: Any) -> Tensor:
    return x


def pieces_in_reverse(x: Tensor, dim: int, group: Any) -> Tensor:
    return torch.cat(list(_gather(x, dim, group).chunk(2, dim))[::-1], dim)


def channels_counted_per_rank(self: Ranks, module: Module, axes: Sequence[str], size: int) -> int:
    return _first(self, module, axes, size) if "vocab" in axes else 0


def tokens_counted_per_rank(self: Ranks, module: Module, axes: Sequence[str], size: int) -> int:
    return 0 if "vocab" in axes else _first(self, module, axes, size)


def samples_counted_per_rank(self: TokenLayout, parts: int, which: int) -> TokenLayout:
    rows = _split_rows(self, parts, which)
    return rows.numbered(-int(rows.sample.min()))


def positions_counted_per_rank(self: Draws, ctx: Ctx, x: Tensor, module: Module, name: str, axes: Sequence[str]) -> Tensor:
    position = torch.arange(x.shape[-2]).expand(x.shape[:-1])
    pairs = _pairs(ctx.ranks.first(module, axes, x.shape[-1]), x.shape[-1], x.device)
    return draw(self._stream(module, name), ctx.layout.sample[..., None], position[..., None], pairs)


def sum_of_one_rank(self: TokenRanks, x: Tensor) -> Tensor:
    return x


def sum_without_gradients_of_others(x: Tensor, group: Any) -> Tensor:
    return collective.leave(x, group)


def counts_of_one_rank(self: TokenRanks, counts: Tensor) -> tuple[Tensor, Tensor]:
    return counts.cumsum(0) - counts, counts.sum(0)


def counts_rank_by_rank(self: TokenRanks, counts: Tensor) -> tuple[Tensor, Tensor]:
    group = self.sequence or self.data
    earlier, total = context._scan(counts.sum(0), group)
    return earlier + (counts.cumsum(0) - counts), total


def neighbor_offset(shape: Any, cut: Any, tensor: tuple[int, int] = (0, 1), data: tuple[int, int] = (0, 1)) -> Any:
    (rank, ranks), (row, rows) = tensor, data
    return _local_slices(shape, cut, ((rank + 1) % ranks, ranks), ((row + 1) % rows, rows))


def max_of_one_rank(self: TensorRanks, x: Tensor) -> Tensor:
    return x


def exponentials_of_one_rank(logits: Tensor, labels: Tensor, module: Module, ctx: Ctx, axes: Sequence[str]) -> Tensor:
    top = ctx.ranks.max(logits.detach().amax(-1), axes)
    row, own = vocab._own(labels, logits.shape[-1], module, ctx, axes)
    target = ctx.ranks.reduce_from_region(torch.where(own, logits.gather(-1, row[:, None])[:, 0], 0.0), axes)
    losses = (logits - top[:, None]).exp().sum(-1).log() + top - target
    return torch.where(labels != vocab.IGNORED, losses, 0.0).sum()


def label_of_one_rank(logits: Tensor, labels: Tensor, module: Module, ctx: Ctx, axes: Sequence[str]) -> Tensor:
    top = ctx.ranks.max(logits.detach().amax(-1), axes)
    row, own = vocab._own(labels, logits.shape[-1], module, ctx, axes)
    total = ctx.ranks.reduce_from_region((logits - top[:, None]).exp().sum(-1), axes)
    losses = total.log() + top - torch.where(own, logits.gather(-1, row[:, None])[:, 0], 0.0)
    return torch.where(labels != vocab.IGNORED, losses, 0.0).sum()


def mean_of_means(self: Ranks, loss: LossSum) -> Tensor:
    return self.batch_sum(loss.mean()) / self.batch_sum(torch.ones(()))


def chunks_of_equal_weight(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    return (out + more) / 2, torch.logaddexp(lse, more_lse)


def chunks_in_reverse(self: RingView, layout: TokenLayout) -> tuple[TokenLayout, ...]:
    return _chunk_layouts(self, layout)[::-1]


def gradients_of_the_last_rank(arrived: Sequence[Tensor], own: Sequence[Tensor]) -> list[Tensor]:
    return list(own)


def dropped_by_own_positions(self: Work, p: Tensor, piece: KeyPiece) -> Tensor:
    return _factor(dc.replace(self, edit_layouts=self.edit_layouts[:1] * 2), p, piece)


def loss_without_gradient(x: Tensor, loss: Tensor) -> Tensor:
    return x


def values_without_gradient(self: Any, *given: Tensor, **named: Any) -> Any:
    out = _staged(self, *given, **named)
    return out if isinstance(out, Tensor) else (out[0], *(value.detach() for value in out[1:]))


def plain_tp(base: Declared) -> Tp:
    return base.weight.tp


def adapter_channels_per_rank(self: InputDropout, x: Tensor, axes: tuple[str, ...], ctx: Ctx) -> Tensor:
    with instead(Ranks, "first", channels_counted_per_rank)():
        return _drop(self, x, axes, ctx)


def mutants() -> list[Mutant]:
    """The seeded bugs of this area."""
    biased, dropping = spec(bias=True, out_bias=True), spec(dropout=0.2).set("layers.*.ffn.dropout", 0.2)
    balanced, limited = experts(balance_loss=0.5), experts(capacity=0.4)
    shared = spec().set("layers.1.mixer.earlier", {"kind": "shared_kv", "layer": 0})
    return [
        Mutant("a bias is added once per rank", "sharded", instead(shard, "_reader", bias_added_on_every_rank), biased),
        Mutant("a gradient is not summed across ranks", "sharded", instead(shard, "enter", gradient_of_one_rank)),
        Mutant("pieces of a sequence are joined in reverse", "sharded", instead(context, "gather", pieces_in_reverse)),
        Mutant("every rank drops the same channels", "sharded", instead(Ranks, "first", channels_counted_per_rank), dropping),
        Mutant(
            "every rank drops the same samples",
            "sharded",
            instead(TokenLayout, "split_rows", samples_counted_per_rank),
            dropping,
        ),
        Mutant("pieces of a sequence drop alike", "sharded", instead(Draws, "_bits", positions_counted_per_rank), dropping),
        Mutant("a balance loss counts one rank's tokens", "sharded", instead(TokenRanks, "sum", sum_of_one_rank), balanced),
        Mutant(
            "a balance loss learns from one rank's tokens",
            "sharded",
            instead(context, "total", sum_without_gradients_of_others),
            balanced,
        ),
        Mutant("a rank fills experts by itself", "sharded", instead(TokenRanks, "counts", counts_of_one_rank), limited),
        Mutant(
            "a shard is initialized at the offset of another rank",
            "sharded",
            instead(construction, "local_slices", neighbor_offset),
        ),
        Mutant("a sharded loss takes the largest logit of one rank", "sharded", instead(TensorRanks, "max", max_of_one_rank)),
        Mutant(
            "a sharded loss sums the exponentials of one rank",
            "sharded",
            instead(head, "sharded_cross_entropy", exponentials_of_one_rank),
        ),
        Mutant(
            "a sharded loss knows the labels of one rank",
            "sharded",
            instead(head, "sharded_cross_entropy", label_of_one_rank),
        ),
        Mutant("the loss of a batch is a mean of the means of ranks", "sharded", instead(Ranks, "batch_mean", mean_of_means)),
        Mutant("every rank has the first rows of a table", "sharded", instead(Ranks, "first", tokens_counted_per_rank)),
        Mutant("chunks of a ring have equal weights", "sharded", instead(ring, "merged", chunks_of_equal_weight)),
        Mutant("a chunk of a ring has the mask of another", "sharded", instead(RingView, "chunk_layouts", chunks_in_reverse)),
        Mutant("the gradient of keys is that of one rank", "sharded", instead(ring, "added", gradients_of_the_last_rank)),
        Mutant("chunks of a ring drop alike", "sharded", instead(Work, "factor", dropped_by_own_positions), dropping),
        Mutant("a router's loss ends with its stage", "sharded", instead(stage, "_add_loss", loss_without_gradient), balanced),
        Mutant(
            "shared keys get no gradient from later stages",
            "sharded",
            instead(stage, "_forward", values_without_gradient),
            shared,
        ),
        Mutant("experts are filled rank by rank", "sharded", instead(TokenRanks, "counts", counts_rank_by_rank), limited),
        Mutant("the adapter of a head is outside of its ranks", "sharded", instead(lora, "tp_of", plain_tp)),
        Mutant(
            "an adapter drops the same channels on every rank",
            "sharded",
            instead(InputDropout, "drop", adapter_channels_per_rank),
        ),
    ]
