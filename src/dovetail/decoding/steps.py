"""Decoding: the steps of a model with its decode state (KV cache, recurrent state), run eagerly or as compiled graphs.

    decoder = Decoder(model, pool, compiled=True)
    logits = decoder.step(tokens, rows)             (rows, n) tokens -> (rows, vocab), the logits after the last of each row

Prefill is eager. Steps of one token per row are compiled, once for the lengths they begin with and once for all (law 11).
On a CPU the weights are constants of the graph, in the layout that its matmuls read fastest; they are packed when the graph is
compiled. A decoder whose weights have changed since refuses to go on. Decoding is in evaluation mode, whatever mode the model
is in between two steps.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from dovetail.base.errors import InputError, StateError
from dovetail.model.model import ModelModule
from dovetail.nn.ctx import Ctx, Listener
from dovetail.nn.fused import fuse
from dovetail.nn.linear import Linear
from dovetail.nn.module import evaluating
from dovetail.state.pool import Pool

WARM = 3  # steps after which both graphs are there: the first has constant lengths, the second meets other ones
OPTIONS: dict[str, Any] = {
    "freezing": True,  # see `frozen`
    "max_autotune": True,
    "max_autotune_gemm_backends": "CPP,ATEN",
    "cpp_wrapper": True,
    "autotune_num_choices_displayed": 0,  # else the times of all kernels are printed
    "max_autotune_report_choices_stats": False,
}


class Decoder:
    """A model, its decode state, and the function that runs a step."""

    def __init__(self, model: ModelModule, pool: Pool, *, compiled: bool = False, listen: Listener | None = None) -> None:
        """`listen` reads and replaces activations in every step, of which it counts the number: a `dovetail.look.Tracer`."""
        if compiled and listen is not None:
            raise InputError("compiled: a compiled graph has no listener; decode eagerly to trace or patch")
        if compiled and model.ranks.axes is not None:
            raise InputError("compiled: a model that is sharded by tensor decodes eagerly; leave it out")
        self.model, self.pool, self.listen, begin = model, pool, listen, time.monotonic()
        if compiled:
            fuse(model)  # 4 % faster in bfloat16, and fewer kernels to compile
        self._compiled: Callable[[Tensor, Ctx], Tensor] | None = compile_step(model) if compiled else None
        self._unchanged = Unchanged(model) if compiled else None
        self.warm = not compiled  # no graph is left to compile
        self._seconds = time.monotonic() - begin  # torch imports its compiler when it is first asked for it

    def step(
        self,
        tokens: Tensor,
        rows: Sequence[int],
        positions: Sequence[Tensor | None] | None = None,
        patches: Tensor | None = None,
    ) -> Tensor:
        """Feed n more tokens (rows, n) to each row; return the logits (rows, vocab) after the last. `positions`: per row the
        coordinates (n, c) of its tokens, as `Pool.step` takes them; `patches`: the images that some of the ids stand for."""
        if self._unchanged is not None and not self._unchanged():  # before the pool changes
            raise StateError("the weights, modules or hooks have changed since they were compiled (make a new Decoder)")
        step = self.pool.step(rows, [tokens.shape[1]] * len(rows), positions=positions)
        ctx = Ctx(layout=step.layout, views=step.views, patches=patches, ranks=self.model.ranks)
        if self.listen is not None:
            ctx.taps = self.listen
        with evaluating(self.model):
            if self._compiled is None or tokens.shape[1] > 1:
                logits = self.model.next_logits(tokens, ctx)[:, -1]
                if self.listen is not None:
                    self.listen.step += 1
                return logits
            # a slice has other strides, for which it would be compiled again
            return self._compiled(tokens.clone(memory_format=torch.contiguous_format), ctx)[:, -1]

    def warm_up(self, rows: Sequence[int]) -> float:
        """Compile the graphs of steps with these rows, which hold some tokens and have room for WARM more; return the seconds
        that took. The rows are as before afterwards."""
        if self._compiled is None:
            return 0.0
        pool, begin = self.pool, time.monotonic()
        before = [(row, pool.lengths[row], list(pool.marks[row])) for row in rows]
        for row in rows:
            pool.mark(row)
        token = torch.zeros(len(rows), 1, dtype=torch.long, device=self.model.device)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "TypedStorage is deprecated")  # torch's own way to freeze
            for _ in range(WARM):
                self.step(token, rows)
        for row, length, marks in before:
            pool.rollback(row, length)
            pool.marks[row] = marks
        self.warm = True
        return time.monotonic() - begin + self._seconds


class Unchanged:
    """Whether a model is what it was: its modules, its weights and the bits in them, and that no hook is there. torch's own
    guards ask the same of a compiled graph, with two thousand comparisons per step for eight layers."""

    def __init__(self, model: ModelModule) -> None:
        own = list(model.modules())
        held = [slots for m in own for slots in (m._modules, m._parameters, m._buffers)]
        self.sizes = [(slots, _filled(slots)) for slots in held]  # an adapter is a new slot
        self.slots = [(slots, name, one) for slots in held for name, one in slots.items()]
        self.weights = [*model.parameters(), *model.buffers()]  # codes and scales of fewer bits are buffers
        self.hooks = [hooks for m in own for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        self.bits = self._bits()

    def _bits(self) -> list[tuple[int, int]]:
        """The address of each weight, and how often it was written to."""
        return [(x.data_ptr(), 0 if x.is_inference() else x._version) for x in self.weights]  # those have no version

    def __call__(self) -> bool:
        """Compare."""
        return (
            all(held.get(name) is one for held, name, one in self.slots)
            and all(_filled(held) == size for held, size in self.sizes)
            and not any(self.hooks)
            and self._bits() == self.bits
        )


def _filled(slots: Mapping[str, Any]) -> int:
    return sum(one is not None for one in slots.values())


def compile_step(model: ModelModule) -> Callable[[Tensor, Ctx], Tensor]:
    """The logits after the last token as one compiled graph, on a CPU with the weights frozen into it."""
    guards: dict[str, Any] = {
        "guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe
    }  # `Unchanged` looks after the modules
    for leaf in model.modules():
        if isinstance(leaf, Linear):
            leaf.storage.prepare(leaf)
    step = _own_code(model)
    if model.device.type != "cpu":
        return torch.compile(step, fullgraph=True, options=guards)
    graph = torch.compile(step, fullgraph=True, options={**OPTIONS, **guards})

    @torch.no_grad()
    def run(tokens: Tensor, ctx: Ctx) -> Tensor:
        with frozen():
            return graph(tokens, ctx)

    return run


def _own_code(model: ModelModule) -> Callable[[Tensor, Ctx], Tensor]:
    """The logits after the last token, by a function with a code object of its own. torch keeps graphs by code object: without
    guards on modules, the graph of one model, with its weights, would serve another of the same shapes."""

    def step(tokens: Tensor, ctx: Ctx) -> Tensor:
        return model.next_logits(tokens, ctx)

    return FunctionType(step.__code__.replace(), globals(), "step", None, step.__closure__)


@contextmanager
def frozen() -> Iterator[None]:
    """Weights are constants of the graphs that are compiled here. In `options=` alone the setting is ignored: torch reads the
    global one when it traces."""
    from torch._inductor import config

    before, config.freezing = config.freezing, True
    try:
        yield
    finally:
        config.freezing = before
