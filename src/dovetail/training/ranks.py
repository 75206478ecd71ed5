"""The ranks of a run in their layout (parallel/layout.py), or one process alone.

    torchrun --nproc-per-node 4 -m dovetail train llama-tiny --data stories --steps 1000 --tensor 2

Gradients of FSDP are means, over the ranks with other tokens (replicas × shards × sequence), of sums over labels, so that
g = number of these ranks · mean / labels of the whole batch.

Stragglers: ranks whose own work of a step takes longer than that of the others, which wait for them.

    own work      data, forward and backward pass, without the seconds inside collectives (parallel/collective.py)
    straggler     median over WINDOW steps ≥ FACTOR · the median rank's, the lower of two middle ones

The seconds of all ranks are sent with the loss, in its collective.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar, Unpack

import torch
import torch.distributed as dist
from torch import Tensor

from dovetail.base.errors import DovetailError
from dovetail.data.corpus import Batch
from dovetail.model.construction import build
from dovetail.model.model import Model
from dovetail.model.transformer import Transformer
from dovetail.nn.host import read_floats
from dovetail.nn.loss import LossSum
from dovetail.nn.module import tensor_at
from dovetail.parallel.collective import summed, waiting
from dovetail.parallel.construction import build_sharded, local, shard_on_meta
from dovetail.parallel.heartbeat import Status
from dovetail.parallel.layout import Axes, Layout
from dovetail.parallel.mesh import joined_ranks, mesh_of, set_timeouts
from dovetail.parallel.watchdog import ends_with_others
from dovetail.training.plan import TIMEOUT

T = TypeVar("T")
ALONE = Layout()


class Totals(NamedTuple):
    """What all ranks found in a step: sums of losses and tokens, and whether some rank set each flag."""

    loss: LossSum
    tokens: int
    flags: tuple[bool, ...]


class JobRanks:
    """This process among the ranks of a run; alone where there is one."""

    def __init__(
        self,
        rank: int = 0,
        layout: Layout = ALONE,
        timeout: float = TIMEOUT,
        status: Status | None = None,
        hosts: Sequence[str] = (),
    ) -> None:
        self.rank, self.layout, self.timeout = rank, layout, timeout  # seconds that a collective may take
        self.count = layout.ranks
        self.status = status or Status()  # what this rank does: others read it when a collective fails
        self.stragglers = Stragglers(hosts or ["localhost"] * self.count)
        self.mesh = mesh_of(layout) if self.count > 1 else None
        self.sequence = None if self.mesh is None or layout.sequence == 1 else self.mesh["sequence"].get_group()
        self.stages = None if self.mesh is None or layout.pipeline == 1 else self.mesh["pipeline"].get_group()

    @property
    def data_rank(self) -> int:
        """Which of the shares of a batch's rows this rank reads."""
        return self.layout.share(self.rank)

    @property
    def data_count(self) -> int:
        """The number of shares of a batch's rows."""
        return self.layout.data

    @property
    def stage(self) -> int:
        """Which stage of a pipeline this rank has."""
        return self.rank // (self.count // self.layout.pipeline)

    @property
    def token_ranks(self) -> int:
        """The number of ranks over which gradients are means: those that have other tokens."""
        return self.layout.data * self.layout.sequence

    def chunk(self, batch: Batch) -> Batch:
        """This rank's chunk of every row."""
        if self.sequence is None:
            return batch
        return batch.chunk(dist.get_world_size(self.sequence), dist.get_rank(self.sequence))

    def over_chunks(self, sums: Mapping[str, LossSum]) -> dict[str, LossSum]:
        """The sums over all chunks of the rows, without a gradient, from those of this rank's."""
        if self.sequence is None:
            return dict(sums)
        both = summed(
            torch.stack([torch.stack([one.sum.double(), one.num_labels.double()]) for one in sums.values()]), self.sequence
        )
        return {name: LossSum(total.to(sums[name].sum.dtype), labels) for name, (total, labels) in zip(sums, both, strict=True)}

    @property
    def first(self) -> bool:
        """Whether this rank writes and prints."""
        return self.rank == 0

    def build(
        self,
        spec: Model,
        seed: int,
        compute_dtype: torch.dtype | None = None,
        dtype: torch.dtype = torch.float32,
        prepare: Callable[[Transformer], Any] | None = None,
    ) -> Transformer:
        """The model in `dtype`: whole, or this rank's shard of it, which computes in `compute_dtype`. `prepare` is called with
        the model before it is sharded: it may attach adapters."""
        if self.mesh is None:
            model = build(spec, seed=seed, dtype=dtype)
            if prepare is not None:
                prepare(model)
            return model
        model = build_sharded(
            spec, self.mesh, seed=seed, dtype=dtype, compute_dtype=compute_dtype, ring=self.layout.ring, prepare=prepare
        )
        set_timeouts(self.timeout)  # of the groups of the mesh
        return model

    def set_weights(self, model: Transformer, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy weights (path, whole tensor) into the model, or this rank's slice of each into its shard."""
        slices = {} if self.mesh is None else shard_on_meta(model.part, self.mesh).slices
        with torch.no_grad():
            for path, tensor in weights:
                if self.mesh is None or path in slices:  # else another stage has it
                    local(tensor_at(model, path)).copy_(tensor[slices.get(path, ())])

    def total(self, loss: LossSum, tokens: int = 0, flags: Sequence[bool] = ()) -> Totals:
        """The sums over all ranks, without a gradient, in one collective."""
        if self.count == 1:
            return Totals(loss, tokens, tuple(flags))
        counts = self.rank % self.layout.tensor == 0  # tensor-parallel ranks have the same tokens, as those of a pipeline have
        work = [0.0] * self.count
        work[self.rank] = self.stragglers.seconds()
        own = torch.tensor([*work, tokens * (counts and self.stage == 0), *flags], dtype=torch.float64)
        sums = torch.cat([torch.stack([loss.sum.double(), loss.num_labels.double()]) * counts, own.to(loss.sum.device)])
        dist.all_reduce(sums)
        total = LossSum(sums[0], sums[1])
        numbers = read_floats(*sums[2:])
        self.stragglers.add(numbers[: self.count])
        num_tokens, *set_by = numbers[self.count :]
        return Totals(total, int(num_tokens), tuple(ranks > 0 for ranks in set_by))

    def norm_of_stages(self, norm: Tensor) -> Tensor:
        """The norm of all gradients, from that of those of this rank's stage."""
        return norm if self.stages is None else summed(norm.square(), self.stages).sqrt()

    def any(self, value: bool) -> bool:
        """Whether the value is true on some rank."""
        if self.count == 1:
            return value
        found = torch.tensor(float(value))
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return bool(found)

    def on_first_rank(self, action: Callable[[], T]) -> T:
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
def ranks_of_run(timeout: float = TIMEOUT, **axes: Unpack[Axes]) -> Iterator[JobRanks]:
    """Join the ranks of torchrun, where it started this process, in a layout (`Layout.of`). A collective that takes longer than
    `timeout` seconds, or a rank that dies, ends all ranks."""
    count = int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1
    layout = Layout.of(count, **axes)
    if count == 1:
        yield JobRanks()
        return
    status = Status()
    with joined_ranks(timeout=timeout), ends_with_others(timeout, status) as members:
        hosts = [member.host for member in members]
        yield JobRanks(dist.get_rank(), layout, timeout, status, hosts)


WINDOW = 20  # steps after which ranks are compared
FACTOR = 1.5
MOST = 8  # stragglers that a line names


class Stragglers:
    """The seconds of own work of each rank, step by step. `hosts` are the names of the ranks' hosts."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self.hosts = tuple(hosts)
        self.begun: float | None = None
        self.steps = list[tuple[float, ...]]()
        self.slow = frozenset[int]()
        self.imbalance: float | None = None  # of the last step: the slowest rank's work ÷ the median rank's

    def begin(self) -> None:
        """Begin a step of this rank."""
        self.begun = time.perf_counter() - waiting.seconds

    def seconds(self) -> float:
        """The seconds of this rank's own work in the step so far."""
        return 0.0 if self.begun is None else time.perf_counter() - waiting.seconds - self.begun

    def add(self, seconds: Sequence[float]) -> None:
        """Add a step: the seconds of each rank."""
        middle = statistics.median_low(seconds)
        self.imbalance = max(seconds) / middle if middle > 0 else None
        self.steps.append(tuple(seconds))

    def changed(self, step: int) -> str | None:
        """After every WINDOW steps: which ranks are stragglers now, where these are others than before."""
        if len(self.steps) < WINDOW:
            return None
        medians = [statistics.median(rank) for rank in zip(*self.steps, strict=True)]
        self.steps.clear()
        middle = statistics.median_low(medians)
        slow = frozenset(rank for rank, median in enumerate(medians) if median >= FACTOR * middle > 0)
        if slow == self.slow:
            return None
        self.slow = slow
        when = f"steps {step - WINDOW + 1} to {step}"
        if not slow:
            return f"{when}: no rank is slow any more"
        named = [
            f"rank {rank} ({self.hosts[rank]}) is slow: {medians[rank]:.3f} s of its own work per step, "
            f"{medians[rank] / middle:.1f} times the median rank's"
            for rank in sorted(slow, key=lambda rank: -medians[rank])[:MOST]
        ]
        rest = [f"and {len(slow) - MOST} more ranks"] if len(slow) > MOST else []
        return f"{when}: {'; '.join([*named, *rest])}"
