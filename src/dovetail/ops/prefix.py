"""A prefix: learned keys and values that every query sees, before those of the tokens. No mask, bias or rotation applies to it.
A position that widens queries widens its keys (`PositionModule.placeless`).

    s_p = cap(q k_pᵀ · scale)                              (…, heads, n, p)       k_p, v_p (p, kv_heads, head)
    z = (e^lse · z + Σ e^s_p v_p) / (e^lse + Σ e^s_p)      from z and lse, attention over the tokens and its log-sum-exp

So a kernel that returns its log-sum-exp needs not know of it, and no key is stored or moved for it.
Sukhbaatar et al. 2019 (persistent memory); Li & Liang 2021 (prefix tuning: trained alone, on a frozen model).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dovetail.core.module import at_least_fp32
from dovetail.core.view import Scoring


def prefix_scores(q: Tensor, scoring: Scoring) -> Tensor:
    """q (…, heads, n, head) -> its scores over the prefix (…, heads, n, p), in float32 at least."""
    assert scoring.prefix is not None
    dtype, keys = at_least_fp32(q.dtype), scoring.prefix[0].transpose(0, 1)  # (kv_heads, p, head)
    grouped = q.to(dtype).unflatten(-3, (keys.shape[0], -1))
    scores = (grouped @ keys[:, None].to(dtype).transpose(-1, -2)).flatten(-4, -3) * scoring.scale
    return scores if scoring.softcap is None else scoring.softcap * torch.tanh(scores / scoring.softcap)


def prefix_values(probs: Tensor, scoring: Scoring) -> Tensor:
    """Probs of the prefix (…, heads, n, p) -> their sum of values (…, heads, n, head), in the dtype of the probs."""
    assert scoring.prefix is not None
    values = scoring.prefix[1].transpose(0, 1)  # (kv_heads, p, head)
    return (probs.unflatten(-3, (values.shape[0], -1)) @ values[:, None].to(probs.dtype)).flatten(-4, -3)


def merged(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two sets of keys from that over each: out (…, n, head), lse (…, n)."""
    both = torch.logaddexp(lse, more_lse)
    return out * (lse - both).exp()[..., None] + more * (more_lse - both).exp()[..., None], both


def with_prefix(out: Tensor, lse: Tensor, q: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """Attention over the prefix and the tokens from that over the tokens alone: out (…, heads, n, head), lse (…, heads, n)."""
    scores = prefix_scores(q, scoring)
    values = prefix_values(torch.softmax(scores, -1), scoring)
    both, lse = merged(out.to(values.dtype), lse, values, torch.logsumexp(scores, -1))
    return both.to(out.dtype), lse
