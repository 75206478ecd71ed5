"""The reference implementation of attention: the equations, one line each. It offers every feature; every other backend is
compared with it.

    s = q kᵀ · scale          s ← cap · tanh(s / cap)          s ← s + bias
    a = softmax(s where allowed, with the sink as one more column)          z = a v
    with a prefix (ops/attend_sets.py), its scores are columns, too, and z = a v + a_p v_p

Shapes: q (…, heads, n, head)   k, v (…, kv_heads, m, head)   s, a (…, heads, n, m). Vaswani et al. 2017.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dovetail.nn.layout import TokenLayout
from dovetail.nn.module import at_least_fp32
from dovetail.nn.view import Edit, Scoring
from dovetail.ops.attend_sets import prefix_scores, prefix_values
from dovetail.ops.implementation import ProblemSize

OFFERS = frozenset({"bias", "bias_grad", "softcap", "sink", "prefix", "dropout", "edit", "compile"})


def cost(shape: ProblemSize, needs: frozenset[str]) -> float:
    """Nanoseconds, roughly: several passes over all n·m scores."""
    return 60_000.0 + 30.0 * shape.rows * shape.heads * shape.queries * shape.keys


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scoring: Scoring,
    q_layout: TokenLayout,
    k_layout: TokenLayout,
    visible: tuple[Tensor, Tensor],
    edit: Edit | None = None,
) -> Tensor:
    """(…, heads, n, head), with all scores in memory. `visible` is the dense mask, and the queries that see no key."""
    allowed, empty = visible
    shared = q.shape[-3] // k.shape[-3]
    k, v = k.repeat_interleave(shared, -3), v.repeat_interleave(shared, -3)
    score_dtype = at_least_fp32(q.dtype)  # a product rounded to bfloat16 moves a score of 30 by up to 1/16
    scores = (q.to(score_dtype) @ k.to(score_dtype).transpose(-1, -2)) * scoring.scale
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    if scoring.bias is not None:
        scores = scores + scoring.bias(q_layout, k_layout, *scoring.tables)
    # a query that sees no key is padding: finite scores here, zero probs below
    scores = scores.masked_fill(~allowed, -torch.inf).masked_fill(empty, 0.0)
    tokens, prefix = k.shape[-2], 0
    if scoring.prefix is not None:
        prefix = len(scoring.prefix[0])
        scores = torch.cat([scores, prefix_scores(q, scoring)], -1)
    if scoring.sink is not None:
        column = scoring.sink[:, None, None].expand(*scores.shape[:-1], 1).to(scores.dtype)
        scores = torch.cat([scores, column], -1)
    whole = torch.softmax(scores, -1).masked_fill(empty, 0.0)
    probs = whole[..., :tokens]
    if edit is not None:
        probs = edit(probs, q_layout, k_layout)
    z = probs.to(v.dtype) @ v
    return z if scoring.prefix is None else z + prefix_values(whole[..., tokens : tokens + prefix], scoring).to(z.dtype)
