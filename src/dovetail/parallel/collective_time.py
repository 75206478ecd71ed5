"""The seconds that this process has spent inside collectives, where a fast rank waits for a slow one.

    own work of a step = its seconds − the seconds inside collectives

Timed are the collectives of tensor parallelism and FSDP's all-gathers and reduce-scatters, where they return when they are
done, as gloo's do. Those of compiled blocks are not, nor NCCL's, which run on a stream of their own.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

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
