"""The ranks of a run: FSDP over all processes of torchrun, or one process alone.

    torchrun --nproc-per-node 2 -m dovetail train llama-tiny --data stories --steps 1000

Each rank has its shard of weights and optimizer state, and its rows of every batch. Gradients of FSDP are means over ranks of
sums over labels, so that g = ranks · mean / labels of all ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dovetail.construction import build
from dovetail.core.errors import DovetailError
from dovetail.core.fold import declared
from dovetail.core.host import read_floats
from dovetail.core.loss import LossSum
from dovetail.core.module import tensor_at
from dovetail.dist.construction import build_sharded, local
from dovetail.dist.lost import ends_with_others
from dovetail.dist.mesh import joined_ranks, make_mesh
from dovetail.dist.place import local_slices
from dovetail.model import Model
from dovetail.training.plan import TIMEOUT
from dovetail.transformer import Transformer

T = TypeVar("T")


class Totals(NamedTuple):
    """What all ranks found in a step: sums of losses and tokens, and whether some rank set each flag."""

    loss: LossSum
    tokens: int
    flags: tuple[bool, ...]


class Ranks:
    """This process among the ranks of a run; alone where there is one."""

    def __init__(self, rank: int = 0, count: int = 1, timeout: float = TIMEOUT) -> None:
        self.rank, self.count, self.timeout = rank, count, timeout  # seconds that a collective may take

    @property
    def first(self) -> bool:
        """Whether this rank writes and prints."""
        return self.rank == 0

    def build(self, spec: Model, seed: int, compute_dtype: torch.dtype | None = None) -> Transformer:
        """The model in float32: whole, or this rank's shard of it, which computes in `compute_dtype`."""
        if self.count == 1:
            return build(spec, seed=seed)
        return build_sharded(spec, make_mesh(data=self.count), seed=seed, compute_dtype=compute_dtype)

    def set_weights(self, model: Transformer, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy weights (path, whole tensor) into the model, or this rank's slice of each into its shard."""
        stored = {d.path: d for d in declared(model.part) if d.weight.stored}
        with torch.no_grad():
            for path, tensor in weights:
                share = (0, 1) if stored[path].weight.buffer else (self.rank, self.count)  # FSDP does not shard buffers
                local(tensor_at(model, path)).copy_(tensor[local_slices(tuple(tensor.shape), None, (0, 1), share)])

    def total(self, loss: LossSum, tokens: int = 0, flags: Sequence[bool] = ()) -> Totals:
        """The sums over all ranks, without a gradient, in one collective."""
        if self.count == 1:
            return Totals(loss, tokens, tuple(flags))
        own = torch.tensor([tokens, *flags], dtype=torch.float64)
        sums = torch.cat([torch.stack([loss.sum.double(), loss.num_labels.double()]), own.to(loss.sum.device)])
        dist.all_reduce(sums)
        total = LossSum(sums[0].to(loss.sum.dtype), sums[1].to(loss.num_labels.dtype))
        num_tokens, *counts = read_floats(*sums[2:])
        return Totals(total, int(num_tokens), tuple(count > 0 for count in counts))

    def any(self, value: bool) -> bool:
        """Whether the value is true on some rank."""
        if self.count == 1:
            return value
        found = torch.tensor(float(value))
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return bool(found)

    def first_does(self, action: Callable[[], T]) -> T:
        """Do something on the first rank; its result, plain data, or its error is that of every rank."""
        if self.count == 1:
            return action()
        held: list[Any] = [None, None]
        if self.first:
            try:
                held[0] = action()
            except DovetailError as error:
                held[1] = error
        dist.broadcast_object_list(held, src=0)
        if held[1] is not None:
            raise held[1]
        return held[0]


@contextmanager
def ranks_of_run(timeout: float = TIMEOUT) -> Iterator[Ranks]:
    """Join the ranks of torchrun, where it started this process. A collective that takes longer than `timeout` seconds, or a
    rank that dies, ends all ranks."""
    if "RANK" not in os.environ or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Ranks()
        return
    with joined_ranks(timeout=timeout), ends_with_others(timeout):
        yield Ranks(dist.get_rank(), dist.get_world_size(), timeout)
