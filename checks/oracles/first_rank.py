"""The first of two tensor-parallel ranks, in one process: what the other rank contributes is given as literal numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dovetail.nn.ctx import Ctx
from dovetail.nn.ranks import Ranks
from dovetail.proof.laws.oracle import row

Numbers = float | Sequence[Any]  # of any depth


class Halved:
    """Each collective takes the next numbers of the other rank."""

    def __init__(self, *others: Numbers) -> None:
        self.others = iter(others)

    @property
    def cuts(self) -> dict[str, int]:
        """The embedding axis is cut in two."""
        return {"embed": 2}

    def sharded(self, axes: Sequence[str]) -> bool:
        """Every axis is sharded."""
        return True

    def piece(self, pieces: int) -> int:
        """The first piece."""
        return 0

    def broadcast(self, x: Tensor) -> Tensor:
        """The first rank's x is this one's."""
        return x

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of this rank plus that of the other."""
        return x + self._other(x)

    def reduce_from_region(self, x: Tensor) -> Tensor:
        """The sum of this rank plus that of the other."""
        return x + self._other(x)

    def copy_to_region(self, x: Tensor) -> Tensor:
        """x; its gradient is this rank's part alone."""
        return x

    def gather_from_region(self, x: Tensor) -> Tensor:
        """The channels of this rank, then those of the other."""
        return torch.cat([x, self._other(x)], -1)

    def max(self, x: Tensor) -> Tensor:
        """The larger of this rank's and the other's."""
        return torch.maximum(x, self._other(x))

    def _other(self, x: Tensor) -> Tensor:
        return torch.as_tensor(next(self.others), dtype=x.dtype)


def halved(*others: Numbers) -> Ctx:
    """The ctx of a forward pass of one token on such a rank."""
    return Ctx(layout=row(1), ranks=Ranks(Halved(*others)))
