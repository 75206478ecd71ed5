"""Ranks: the ranks that share the axes of a model (tensor parallel), and those that split the tokens of its batch.

    x ── copy to the region ── multiply by a shard of each weight ── reduce from the region ── y        Shoeybi et al. 2019

A tensor-parallel region takes an input that every rank has whole. Each rank multiplies it by its shard of the weights; the sum
of what the ranks compute is the output. `copy_to_region` sums the gradient of the input, `reduce_from_region` the outputs, and
`gather_from_region` concatenates shards instead. Statistics of a batch (balance losses, the capacity of an expert) are those of
the whole batch, however ranks split it: `batch_sum`, `batch_counts`, `batch_mean`.

Every method returns its argument where no rank has another share, so that a part calls them without asking.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from dovetail.base.errors import InputError
from dovetail.nn.loss import LossSum
from dovetail.spec.scope import Scope


class Placed(Protocol):
    """What has axes: its path, and their sizes. A module, or the adapter of a leaf."""

    @property
    def path(self) -> str:
        """Its path in the model."""
        ...

    @property
    def scope(self) -> Scope:
        """The sizes of its axes."""
        ...


class AxisRanks(Protocol):
    """The ranks that share some logical axes (tensor parallel)."""

    @property
    def cuts(self) -> Mapping[str, int]:
        """The axes that are sharded, and into how many shards."""
        ...

    def sharded(self, axes: Sequence[str]) -> bool:
        """Whether any of the axes is sharded across ranks."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of x over the ranks, with its gradient."""
        ...

    def copy_to_region(self, x: Tensor) -> Tensor:
        """Return x; its gradient is summed over the ranks."""
        ...

    def reduce_from_region(self, x: Tensor) -> Tensor:
        """Return the sum of x over the ranks; the gradient passes unchanged."""
        ...

    def gather_from_region(self, x: Tensor) -> Tensor:
        """Return x of all ranks, concatenated along the last dimension; the gradient is that of this rank's part."""
        ...

    def max(self, x: Tensor) -> Tensor:
        """Return the largest x of all ranks, without gradient."""
        ...

    def piece(self, pieces: int) -> int:
        """Return the number of the piece that this rank has of an axis in `pieces` equal ones."""
        ...

    def broadcast(self, x: Tensor) -> Tensor:
        """Return the first rank's x."""
        ...


class BatchRanks(Protocol):
    """The ranks that split the tokens of a batch: its rows (data parallel), or every row (a split sequence)."""

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of x over the ranks, with its gradient."""
        ...

    def counts(self, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Return what `Ranks.batch_counts` returns."""
        ...

    def broadcast(self, x: Tensor) -> Tensor:
        """Return the first rank's x."""
        ...


class Ranks:
    """The ranks of a run: those that share axes, and those that split the batch; either may be None."""

    __slots__ = ("axes", "batch")

    def __init__(self, axes: AxisRanks | None = None, batch: BatchRanks | None = None) -> None:
        self.axes, self.batch = axes, batch

    @property
    def cuts(self) -> Mapping[str, int]:
        """The axes that are sharded, and into how many shards."""
        return {} if self.axes is None else self.axes.cuts

    def sharded(self, axes: Sequence[str]) -> bool:
        """Whether any of the logical axes is sharded across ranks."""
        return self.axes is not None and self.axes.sharded(axes)

    def all_reduce(self, x: Tensor, axes: Sequence[str]) -> Tensor:
        """Return x summed over the ranks that share these axes, with its gradient."""
        return self.axes.all_reduce(x) if self.axes is not None and self.axes.sharded(axes) else x

    def copy_to_region(self, x: Tensor, axes: Sequence[str]) -> Tensor:
        """Return x, which every rank has whole and multiplies by its shard of a weight over these axes: the gradient of x is
        summed over the ranks."""
        return self.axes.copy_to_region(x) if self.axes is not None and self.axes.sharded(axes) else x

    def reduce_from_region(self, x: Tensor, axes: Sequence[str]) -> Tensor:
        """Return partial sums over shards of these axes as their sum, which every rank then has whole."""
        return self.axes.reduce_from_region(x) if self.axes is not None and self.axes.sharded(axes) else x

    def gather_from_region(self, x: Tensor, axes: Sequence[str]) -> Tensor:
        """Return the shards (…, size/ranks) of these axes as a whole (…, size), which every rank then has."""
        return self.axes.gather_from_region(x) if self.axes is not None and self.axes.sharded(axes) else x

    def max(self, x: Tensor, axes: Sequence[str]) -> Tensor:
        """Return the largest x of the ranks that share these axes, without gradient."""
        return self.axes.max(x) if self.axes is not None and self.axes.sharded(axes) else x

    def first(self, module: Placed, axes: Sequence[str], size: int) -> int:
        """The global index of this rank's first channel, of `size` channels along the axes."""
        total = module.scope.size(*axes)
        if size == total:
            return 0
        if self.axes is None or total % size:
            raise InputError(f"{module.path}: {size} channels of {' × '.join(axes)} = {total}; without ranks they must be all")
        return self.axes.piece(total // size) * size

    def broadcast(self, x: Tensor) -> Tensor:
        """Return the first rank's x."""
        for ranks in (self.axes, self.batch):
            x = x if ranks is None else ranks.broadcast(x)
        return x

    def batch_sum(self, x: Tensor) -> Tensor:
        """Return x, a sum over the tokens of this rank, summed over all tokens of the batch.

        Its gradient is summed as well: where the losses of the ranks are averaged, one that is computed from x counts once.
        """
        return x if self.batch is None else self.batch.sum(x)

    def batch_counts(self, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Take counts (rows, …) of the tokens of this rank, per row. Return the counts (rows, …) of all tokens of the batch
        before those of each row, in the order row by row, and the counts (…) of the whole batch. No gradient."""
        if self.batch is not None:
            return self.batch.counts(counts)
        return counts.cumsum(0) - counts, counts.sum(0)

    def batch_mean(self, loss: LossSum) -> Tensor:
        """Return the mean of a loss over all labels of the batch, the same on every rank. Its gradient is exact where gradients
        are averaged over ranks, as FSDP does."""
        return LossSum(self.batch_sum(loss.sum), self.batch_sum(loss.num_labels)).mean()


ALONE = Ranks()  # one rank
