"""Differentiable collectives: all-reduce, all-gather, send and receive, each with its exact gradient.

    enter   forward: x            backward: Σ over ranks      a replicated tensor enters a tensor-parallel region
    leave   forward: Σ over ranks backward: g                 partial sums leave it as their sum, replicated
    total   forward: Σ over ranks backward: Σ over ranks      a statistic over shards that every rank uses on its own
    join    forward: join         backward: own piece         shards of an axis become whole, on every rank
    gather  forward: join         backward: Σ, own piece      chunks of a sequence become the sequence, on every rank
    receive forward: ← rank − 1   backward: g to rank − 1     the recurrent state, from the previous rank …
    hand_on forward: to rank + 1  backward: g ← rank + 1      … and to the next rank

Gradients are copied to contiguous memory first: an in-place reduction over permuted strides silently gives wrong numbers.
Shoeybi et al. 2019 (enter and leave, there f and g).

The seconds inside collectives are timed, where a fast rank waits for a slow one:

    own work of a step = its seconds − the seconds inside collectives

Timed are the collectives of tensor parallelism and FSDP's all-gathers and reduce-scatters, where they return when they are
done, as gloo's do. Those of compiled blocks are not, nor NCCL's, which run on a stream of their own.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

# -- the time inside collectives --------------------------------------------------------------------------------------


P = ParamSpec("P")
T = TypeVar("T")


class Waiting:
    """A stopwatch that runs inside collectives."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, collective: Callable[P, T]) -> Callable[P, T]:
        """Return the collective as one that is timed."""

        @functools.wraps(collective)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            if torch.compiler.is_compiling():  # a clock would break the graph
                return collective(*args, **kwargs)
            begin = time.perf_counter()
            try:
                return collective(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - begin

        return run


waiting = Waiting()


class TimedAllGather(DefaultAllGather):
    """FSDP's all-gather, timed."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return waiting.timed(super().__call__)(*args, **kwargs)


class TimedReduceScatter(DefaultReduceScatter):
    """FSDP's reduce-scatter, timed."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return waiting.timed(super().__call__)(*args, **kwargs)


def time_collectives(model: nn.Module) -> None:
    """Time the collectives of every FSDP unit of a model."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(TimedAllGather())
            module.set_custom_reduce_scatter(TimedReduceScatter())


# -- collectives ------------------------------------------------------------------------------------------------------


@waiting.timed
def summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of x over the ranks as a new tensor, not differentiable."""
    out = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=group)
    return out


@waiting.timed
def joined(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return x of every rank concatenated along dim as a new tensor, not differentiable."""
    own = x.detach().contiguous()
    pieces = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(pieces, own, group=group)
    return torch.cat(pieces, dim)


def enter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return x; its gradient is all-reduced."""
    return _AllReduce.apply(x, group, False, True)  # type: ignore[no-any-return]


def leave(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of x over the ranks; the gradient is replicated already and passes unchanged."""
    return _AllReduce.apply(x, group, True, False)  # type: ignore[no-any-return]


def total(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of x over the ranks; its gradient is all-reduced too."""
    return _AllReduce.apply(x, group, True, True)  # type: ignore[no-any-return]


@waiting.timed
def largest(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the largest x of the ranks as a new tensor, not differentiable."""
    out = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, op=dist.ReduceOp.MAX, group=group)
    return out


def join(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return the shards of every rank, all of one shape, concatenated along dim; the gradient is replicated already."""
    return _Join.apply(x, dim % x.dim(), group, False)  # type: ignore[no-any-return]


def gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return x of every rank, all of one shape, concatenated along dim."""
    return _Join.apply(x, dim % x.dim(), group, True)  # type: ignore[no-any-return]


def receive(x: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return x and the tensors sent by the previous rank; must not be called on the first rank."""
    x, *carry = _Receive.apply(x, group)  # type: ignore[misc]
    return x, tuple(carry)


def hand_on(y: Tensor, carry: Sequence[Tensor], group: dist.ProcessGroup) -> Tensor:
    """Send the tensors to the next rank and return y; not for the last rank. Their gradient comes back through y."""
    return _HandOn.apply(y, group, *carry)  # type: ignore[no-any-return]


class _AllReduce(torch.autograd.Function):
    """x, summed over the ranks in the forward pass or not, and its gradient, summed in the backward pass or not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, forward: bool, backward: bool) -> Tensor:
        ctx.group, ctx.sums = group, backward
        return summed(x, group) if forward else x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:  # type: ignore[override]
        return summed(g, ctx.group) if ctx.sums else g, None, None, None


class _Join(torch.autograd.Function):
    """x of all ranks, concatenated; the gradient is summed over the ranks before each takes its piece, or not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup, sums: bool) -> Tensor:
        ctx.dim, ctx.size, ctx.group, ctx.sums = dim, x.shape[dim], group, sums
        return joined(x, dim, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:  # type: ignore[override]
        whole = summed(g, ctx.group) if ctx.sums else g
        return whole.narrow(ctx.dim, dist.get_rank(ctx.group) * ctx.size, ctx.size), None, None, None


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Any:
        ctx.group, before = group, dist.get_rank(group) - 1
        return x.view_as(x), *take_tensors(x, before, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor, *grads: Tensor) -> Any:  # type: ignore[override]
        send_tensors(grads, dist.get_rank(ctx.group) - 1, ctx.group)
        return g, None


class _HandOn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, group: dist.ProcessGroup, *carry: Tensor) -> Tensor:
        ctx.group = group
        send_tensors(carry, dist.get_rank(group) + 1, group)
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:  # type: ignore[override]
        return g, None, *take_tensors(g, dist.get_rank(ctx.group) + 1, ctx.group)


MOST = 64  # numbers in the header message: how many tensors follow, and the dtype and shape of each
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64)


def send_tensors(tensors: Sequence[Tensor], to: int, group: dist.ProcessGroup) -> None:
    """Send tensors, with their dtypes and shapes, to a rank of the group."""
    shapes = [number for tensor in tensors for number in (DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape)]
    numbers = torch.tensor([len(tensors), *shapes])
    header = torch.zeros(MOST, dtype=torch.long)
    header[: len(numbers)] = numbers
    for message in (header, *tensors):
        dist.send(message.detach().contiguous(), group=group, group_dst=to)


def take_tensors(like: Tensor, origin: int, group: dist.ProcessGroup) -> list[Tensor]:
    """Receive the tensors that a rank of the group sends, on the device of `like`."""
    header = torch.zeros(MOST, dtype=torch.long)
    dist.recv(header, group=group, group_src=origin)
    count, *numbers = header.tolist()
    taken: list[Tensor] = []
    for _ in range(count):
        (dtype, dims), numbers = numbers[:2], numbers[2:]
        taken.append(torch.empty(numbers[:dims], dtype=DTYPES[dtype], device=like.device))
        numbers = numbers[dims:]
        dist.recv(taken[-1], group=group, group_src=origin)
    return taken
