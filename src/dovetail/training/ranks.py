"""The ranks of a run, data × tensor, or one process alone.

    torchrun --nproc-per-node 4 -m dovetail train llama-tiny --data stories --steps 1000 --tensor 2

Ranks along `data` have their rows of every batch and, by FSDP, their share of weights and optimizer state; those along `tensor`
have the same rows, and their heads, hidden units and experts of every layer. Gradients of FSDP are means over the ranks of data
of sums over labels, so that g = ranks of data · mean / labels of all rows.
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
from dovetail.core.errors import DovetailError, UsageError
from dovetail.core.host import read_floats
from dovetail.core.loss import LossSum
from dovetail.core.module import tensor_at
from dovetail.dist.construction import build_sharded, local, shard_on_meta
from dovetail.dist.heartbeat import Status
from dovetail.dist.lost import ends_with_others
from dovetail.dist.mesh import joined_ranks, make_mesh, set_timeouts
from dovetail.model import Model
from dovetail.training.plan import TIMEOUT
from dovetail.training.stragglers import Stragglers
from dovetail.transformer import Transformer

T = TypeVar("T")


class Totals(NamedTuple):
    """What all ranks found in a step: sums of losses and tokens, and whether some rank set each flag."""

    loss: LossSum
    tokens: int
    flags: tuple[bool, ...]


class Ranks:
    """This process among the ranks of a run; alone where there is one."""

    def __init__(
        self,
        rank: int = 0,
        count: int = 1,
        timeout: float = TIMEOUT,
        tensor: int = 1,
        status: Status | None = None,
        hosts: Sequence[str] = (),
    ) -> None:
        self.status = status or Status()  # what this rank does: others read it when a collective fails
        self.stragglers = Stragglers(hosts or ["localhost"] * count)
        self.rank, self.count, self.timeout = rank, count, timeout  # seconds that a collective may take
        if tensor < 1 or count % tensor:
            processes = "one process" if count == 1 else f"{count} processes"
            raise UsageError(f"--tensor: {tensor} does not divide {processes}; start a multiple of {tensor} with torchrun")
        self.tensor = tensor
        self.mesh = make_mesh(data=count // tensor, tensor=tensor) if count > 1 else None

    @property
    def data_rank(self) -> int:
        """Which of the shares of a batch this rank reads."""
        return self.rank // self.tensor

    @property
    def data_count(self) -> int:
        """The number of shares of a batch."""
        return self.count // self.tensor

    @property
    def first(self) -> bool:
        """Whether this rank writes and prints."""
        return self.rank == 0

    def build(self, spec: Model, seed: int, compute_dtype: torch.dtype | None = None) -> Transformer:
        """The model in float32: whole, or this rank's shard of it, which computes in `compute_dtype`."""
        if self.mesh is None:
            return build(spec, seed=seed)
        model = build_sharded(spec, self.mesh, seed=seed, compute_dtype=compute_dtype)
        set_timeouts(self.timeout)  # of the groups of the mesh
        return model

    def set_weights(self, model: Transformer, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy weights (path, whole tensor) into the model, or this rank's slice of each into its shard."""
        slices = {} if self.mesh is None else shard_on_meta(model.part, self.mesh).slices
        with torch.no_grad():
            for path, tensor in weights:
                local(tensor_at(model, path)).copy_(tensor[slices.get(path, ())])

    def total(self, loss: LossSum, tokens: int = 0, flags: Sequence[bool] = ()) -> Totals:
        """The sums over all ranks, without a gradient, in one collective."""
        if self.count == 1:
            return Totals(loss, tokens, tuple(flags))
        counts = self.rank % self.tensor == 0  # tensor-parallel ranks have the same rows
        work = [0.0] * self.count
        work[self.rank] = self.stragglers.seconds()
        own = torch.tensor([*work, tokens * counts, *flags], dtype=torch.float64)
        sums = torch.cat([torch.stack([loss.sum.double(), loss.num_labels.double()]) * counts, own.to(loss.sum.device)])
        dist.all_reduce(sums)
        total = LossSum(sums[0].to(loss.sum.dtype), sums[1].to(loss.num_labels.dtype))
        numbers = read_floats(*sums[2:])
        self.stragglers.add(numbers[: self.count])
        num_tokens, *set_by = numbers[self.count :]
        return Totals(total, int(num_tokens), tuple(ranks > 0 for ranks in set_by))

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
def ranks_of_run(timeout: float = TIMEOUT, tensor: int = 1) -> Iterator[Ranks]:
    """Join the ranks of torchrun, where it started this process; `tensor` of them share each layer. A collective that takes
    longer than `timeout` seconds, or a rank that dies, ends all ranks."""
    if "RANK" not in os.environ or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Ranks(tensor=tensor)
        return
    status = Status()
    with joined_ranks(timeout=timeout), ends_with_others(timeout, status) as members:
        hosts = [one.host for one in members]
        yield Ranks(dist.get_rank(), dist.get_world_size(), timeout, tensor, status, hosts)
