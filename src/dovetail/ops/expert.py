"""Experts of an MoE: tokens sorted by expert, one matmul per expert, and the results back in token order.

    chosen (tokens, k)   ──dispatch──   rows (tokens·k) sorted by expert; those of experts on other ranks at the end
    y[rows of expert e] = x[rows of expert e] W_eᵀ                     `looped`: expert by expert; `grouped`: one fused kernel
    out = Σ over the k choices of a token of  weight · y               ──combine──

`looped` is the reference implementation, for every dtype. `grouped` is torch's grouped_mm: float32, bfloat16 and float16, where
the rows of both operands are multiples of 16 bytes. A compiler cannot know where a run ends, so in a compiled graph the loop is
one custom operation with its own backward, and grouped_mm is used for bfloat16 alone.

Shapes: x (rows, inp)   weights (experts, out, inp)   ends (experts,): where each expert's rows end   y (rows, out).
Shazeer et al. 2017; Gale et al. 2022 (dropless).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.nn.host import read
from dovetail.ops.implementation import reference

LANE = 16  # bytes that torch's kernel reads at once: a row must be a multiple


class SortedRows(NamedTuple):
    """The choices of all tokens, sorted by expert."""

    choice: Tensor  # (rows,) the number of the choice: token · k + which of its k
    expert: Tensor  # (rows,) the expert, numbered among those on this rank
    ends: Tensor  # (experts,) where the rows of each expert end
    local: Tensor | None  # (rows, 1) whether the expert is on this rank; None: all are

    def multiply(self, x: Tensor, matrices: Tensor) -> Tensor:
        """Multiply each row (rows, inp) by the matrix (out, inp) of its expert."""
        return product(x, matrices, self)


def dispatch(chosen: Tensor, first: Tensor, experts: int, all_local: bool) -> SortedRows:
    """Sort the choices (tokens, k) by expert, for the `experts` experts from number `first` on; tokens stay in order."""
    number = chosen.flatten() - first
    if not all_local:
        number = torch.where((number >= 0) & (number < experts), number, experts)
    expert, choice = number.sort(stable=True)
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=chosen.device).scatter_add(0, number, torch.ones_like(number))
    ends = counts[:experts].cumsum(0).to(torch.int32)
    if all_local:
        return SortedRows(choice, expert, ends, None)
    return SortedRows(choice, expert.clamp(max=experts - 1), ends, (expert < experts)[:, None])


def gather(x: Tensor, rows: SortedRows, choices: int) -> Tensor:
    """x (tokens, inp) -> the token of each row (rows, inp)."""
    return x.index_select(0, rows.choice // choices)


def by_token(y: Tensor, rows: SortedRows, choices: int) -> Tensor:
    """y (rows, out) -> (tokens, k, out): what the experts of each token return; zero where an expert is on another rank."""
    if rows.local is not None:
        y = torch.where(rows.local, y, 0.0)
    return y.index_select(0, rows.choice.argsort()).unflatten(0, (-1, choices))


def combine(y: Tensor, weights: Tensor) -> Tensor:
    """y (tokens, k, out), weights (tokens, k) -> (tokens, out): each token's choices weighted and summed, in the weights'
    dtype."""
    return (y * weights[..., None]).sum(-2)


def product(x: Tensor, weights: Tensor, rows: SortedRows) -> Tensor:
    """Multiply each row by the matrix of its expert; rows of experts on other ranks are zero."""
    if not reference() and able(x, weights):
        if rows.local is None:
            return grouped(x, weights, rows.ends)
        # the kernel leaves rows past the last run uninitialized, forward and backward
        return torch.where(rows.local, grouped(torch.where(rows.local, x, 0.0), weights, rows.ends), 0.0)
    return _looped_op(x, weights, rows.ends) if torch.compiler.is_compiling() else looped(x, weights, rows.ends)


def looped(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """One matmul per expert; rows past the last run are zero."""
    edges = [0, *read(ends), x.shape[0]]
    *runs, rest = x.split(
        [end - begin for begin, end in pairwise(edges)]
    )  # split, not slices: its gradient is one concatenation
    pieces = [run @ weight.T for run, weight in zip(runs, weights.unbind(0), strict=True) if len(run)]
    # where no token chose an expert of this rank, x still has a gradient: its backward pass is a collective of all ranks
    pieces = pieces or [runs[0] @ weights[0].T]
    return torch.cat([*pieces, rest.new_zeros(len(rest), weights.shape[1])])


def grouped(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """One kernel for all experts; rows past the last run are uninitialized."""
    y = F.grouped_mm(x.contiguous(), weights.transpose(-2, -1), offs=ends)
    return y if torch.compiler.is_compiling() else _ContiguousGrad.apply(y)  # type: ignore[no-any-return]


def able(x: Tensor, weights: Tensor) -> bool:
    """Whether torch's kernel takes these operands, forward and backward."""
    if x.dtype != weights.dtype or any(size * x.element_size() % LANE for size in weights.shape[1:]):
        return False
    if x.dtype == torch.bfloat16:
        return True
    return x.dtype in (torch.float32, torch.float16) and x.device.type == "cpu" and not torch.compiler.is_compiling()


class _ContiguousGrad(torch.autograd.Function):
    """The identity, with a contiguous gradient: the kernel refuses an expanded one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g.contiguous()


# -- the loop as one operation of a compiled graph --------------------------------------------------------------------


@torch.library.custom_op("dovetail::experts", mutates_args=())
def _looped_op(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return looped(x, weights, ends)


@torch.library.custom_op("dovetail::experts_backward", mutates_args=())
def _looped_back(g: Tensor, x: Tensor, weights: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the weights."""
    grad_weights, begin = torch.zeros_like(weights), 0
    for expert, end in enumerate(read(ends)):
        grad_weights[expert] = g[begin:end].T @ x[begin:end]
        begin = end
    return looped(g, weights.transpose(-2, -1), ends), grad_weights


@_looped_op.register_fake
def _(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weights.shape[1])


@_looped_back.register_fake
def _(g: Tensor, x: Tensor, weights: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weights)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _back(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
    return *_looped_back(g, *ctx.saved_tensors), None


_looped_op.register_autograd(_back, setup_context=_keep)
