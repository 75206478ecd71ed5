"""The ranks that split the tokens of a batch, for what is a statistic of the whole batch: balance losses, expert capacity.

    data       each rank has other rows           rank 0: rows 0 … b/2 − 1        rank 1: rows b/2 … b − 1
    sequence   each rank has a chunk of every row rank 0: tokens 0 … n/2 − 1      rank 1: tokens n/2 … n − 1

A run sets them as `ctx.batch_ranks`: FSDP by itself (parallel/shard.py), `split_ctx` for a split sequence
(parallel/context.py), or both. The tokens of the whole batch are ordered row by row. Before the chunk of row i on this rank
come

    the chunks of row i on earlier sequence ranks  +  the rows before i on all sequence ranks  +  all rows of earlier data ranks
"""

from __future__ import annotations

import dataclasses as dc
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from dovetail.core.ctx import Ctx
from dovetail.parallel.collective import joined, total


class RunRanks(ABC):
    """Ranks that are set in the ctx of every run of a model (`run_with`, parallel/shard.py)."""

    @abstractmethod
    def given_to(self, ctx: Ctx) -> Ctx:
        """Return the ctx with these ranks."""

    def run(self) -> AbstractContextManager[None]:
        """Return the context in which the model runs; by default it needs no preparation."""
        return nullcontext()


@dc.dataclass(frozen=True)
class TokenRanks(RunRanks):
    """The ranks among which the tokens of a batch are split; None where they are not."""

    data: dist.ProcessGroup | None = None
    sequence: dist.ProcessGroup | None = None

    def sum(self, x: Tensor) -> Tensor:
        """Return x summed over all ranks; its gradient is all-reduced too."""
        for group in self._groups():
            x = total(x, group)
        return x

    def counts(self, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Take counts (rows, …) of this rank; return those of all tokens before each of these rows' chunks (rows, …), and those
        of the whole batch (…)."""
        earlier_chunks, rows = _scan(counts, self.sequence)
        earlier_ranks, whole = _scan(rows.sum(0), self.data)
        return earlier_chunks + (rows.cumsum(0) - rows) + earlier_ranks, whole

    def broadcast(self, x: Tensor) -> Tensor:
        """Return the first rank's x."""
        x = x.clone()
        for group in self._groups():
            dist.broadcast(x, group=group, group_src=0)
        return x

    def given_to(self, ctx: Ctx) -> Ctx:
        """Return the ctx with these ranks, beside those that split its sequence.

        A layout without numbers of its documents gets those of the whole batch, of as many rows on every rank: with numbers
        from 0, all ranks would draw the same dropout."""
        before, layout = ctx.batch_ranks, ctx.layout
        sequence = before.sequence if isinstance(before, TokenRanks) else None
        if self.data is not None and not layout.has_samples:
            rows = layout.order.shape[0] if layout.row is None else layout.rows
            layout = layout.numbered(dist.get_rank(self.data) * rows)
        return dc.replace(ctx, layout=layout, batch_ranks=TokenRanks(self.data, sequence))

    def _groups(self) -> list[dist.ProcessGroup]:
        return [group for group in (self.data, self.sequence) if group is not None]


def _scan(x: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Return the sum of x over the ranks before this one, and over all ranks."""
    if group is None:
        return torch.zeros_like(x), x
    ranks = joined(x[None], 0, group)
    return ranks[: dist.get_rank(group)].sum(0), ranks.sum(0)
