"""torch's FlexAttention: one fused kernel with soft-cap, bias and mask, which skips the blocks that the mask leaves empty.

    s = cap · tanh(q kᵀ · scale / cap) + bias          z = softmax(s where allowed) v          with a sink: z · σ(lse − sink)

lse is the log of the sum of exp(s) over the keys of a query; a sink adds exp(sink) to that sum, and nothing to z. It is chosen
on CUDA alone: compiled for a CPU it has no lse and no backward. No GPU has run it here. What it is asked for is held to the
reference on a CPU by torch's own form of it without compilation (tests/ops/test_attend_flex.py): the forward alone, since torch
has no backward of it on a CPU, and not its fused kernel. Dong et al. 2024.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from dovetail.nn.layout import TokenLayout
from dovetail.nn.view import Scoring
from dovetail.ops.attend_sets import with_prefix
from dovetail.ops.implementation import ProblemSize

OFFERS = frozenset({"bias", "softcap", "sink", "prefix", "compile"})


def cost(shape: ProblemSize, needs: frozenset[str]) -> float:
    """Nanoseconds, roughly: above torch's kernel with its own flag, below it with a dense mask or bias."""
    return 60_000.0 + 5.0 * shape.rows * shape.heads * shape.queries * shape.keys


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scoring: Scoring,
    q_layout: TokenLayout,
    k_layout: TokenLayout,
    visible: tuple[Tensor, Tensor],
    edit: None = None,
) -> Tensor:
    """(…, heads, n, head). `visible` is the dense mask, and the queries that see no key."""
    flat = q.dim() == 3
    if flat:
        q, k, v = q[None], k[None], v[None]
    allowed, empty = visible
    key = ("flex", scoring.mask.key, scoring.mask.by_head(), q.shape[:-1])
    block_mask = k_layout.once_for(q_layout, key, _block_mask, allowed, q.shape, k.shape[-2])
    bias = None if scoring.bias is None else scoring.bias(q_layout, k_layout, *scoring.tables).to(q.dtype)
    z, aux = _kernel()(
        q,
        k,
        v,
        score_mod=_score(scoring.softcap, None if bias is None else bias.expand(*q.shape[:-1], k.shape[-2])),
        block_mask=block_mask,
        scale=scoring.scale,
        enable_gqa=q.shape[-3] != k.shape[-3],
        return_aux=_lse(),
    )
    lse = aux.lse
    if scoring.prefix is not None:
        z, lse = with_prefix(z, lse, q, scoring)
    if scoring.sink is not None:
        z = z * torch.sigmoid(lse - scoring.sink[:, None])[..., None].to(z.dtype)
    z = z.masked_fill(empty, 0.0)
    return z[0] if flat else z


def _lse() -> Any:
    from torch.nn.attention.flex_attention import AuxRequest

    return AuxRequest(lse=True)


def _score(cap: float | None, bias: Tensor | None) -> Callable[..., Tensor] | None:
    """The function that changes a score at (row, head, query, key)."""
    if cap is None and bias is None:
        return None

    def changed(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if cap is not None:
            score = cap * torch.tanh(score / cap)
        return score if bias is None else score + bias[b, h, i, j]

    return changed


def _block_mask(allowed: Tensor, queries: torch.Size, keys: int) -> Any:
    """The blocks that have a visible key, and the mask within them."""
    from torch.nn.attention.flex_attention import create_block_mask

    rows, heads, n, _ = queries
    by_head = allowed.dim() > 2 and allowed.shape[-3] > 1
    shown = allowed.expand(rows, heads, n, keys)  # the kernel asks for every head, also where the blocks are those of all

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return shown[b, h, i, j]

    return create_block_mask(seen, rows, heads if by_head else None, n, keys, device=str(allowed.device))


def _kernel() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention if torch.compiler.is_compiling() else _compiled()


@lru_cache
def _compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)
