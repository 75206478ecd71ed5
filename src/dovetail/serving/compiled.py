"""Compiled decoding in the engine: one graph for all rows of the pool, of which those that do not decode are padding.

    logits (rows, vocab) = graph(tokens (rows, 1), ctx)          rows: always all of the pool, so that one graph serves any load

On a CPU an eager step of a small model spends a third of its time on calls; the graph has next to none. It is compiled when the
engine starts, for a minute or more, with the weights as constants, which are in memory once more beside those of eager steps.
Eager are steps with a part of a prompt, drafts or adapters, of few rows, and with more keys than one copy of pages takes. No
request waits for a compiler: a step that the graph does not fit runs eagerly.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor

from dovetail.base.errors import InputError
from dovetail.decoding.steps import WARM, compile_step
from dovetail.model.model import ModelModule
from dovetail.nn.ctx import Ctx
from dovetail.nn.fused import fuse
from dovetail.state.pages import TOKENS
from dovetail.state.pool import Pool

FEWEST = 0.25  # of the rows decode at least


class CompiledStep:
    """The graph of a model on a paged pool."""

    def __init__(self, model: ModelModule, pool: Pool, page: int, room: int) -> None:
        """Compile; the pool is empty, before and afterwards, and a row of it has room for so many tokens. `model` has its
        matrices as files store them."""
        if room < page + WARM:
            what = f"compiled: its graph is made with {page + WARM} tokens, and a row has room for {room}"
            raise InputError(f"{what}; give larger `longest` and `pages`, or leave it out")
        self.model, self.pool, self.page = model, pool, page
        fuse(model)
        self.graph = compile_step(model)
        with torch.inference_mode(False), torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "TypedStorage is deprecated")  # torch's own way to freeze
            # one row has tokens, since rows that are alike have another layout; two pages, since torch makes a case of one
            pool.step([0], [page])
            for _ in range(WARM):
                self._run({0: 0})
        pool.free(0)

    def takes(self, rows: int) -> bool:
        """Whether the graph fits a step in which so many rows decode."""
        lengths = self.pool.lengths
        fits = self.page <= max(lengths) and len(lengths) * (max(lengths) + 1) <= TOKENS
        return fits and rows >= FEWEST * len(lengths) and (len(set(lengths)) > 1 or len(lengths) == 1)

    def __call__(self, tokens: Mapping[int, int]) -> Tensor:
        """Feed one token to each of these rows; return the logits (rows of the pool, vocab), of which theirs mean something."""
        # tensors of inference mode are another case for the graph
        with torch.inference_mode(False), torch.no_grad(), torch.compiler.set_stance("eager_on_recompile"):
            return self._run(tokens)

    def _run(self, tokens: Mapping[int, int]) -> Tensor:
        rows, device = range(self.pool.rows), self.model.device
        step = self.pool.step(rows, [int(row in tokens) for row in rows])
        given = torch.tensor([[tokens.get(row, 0)] for row in rows], device=device)
        return self.graph(given, Ctx(layout=step.layout, views=step.views))[:, -1]
