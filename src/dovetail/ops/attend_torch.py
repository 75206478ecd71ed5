"""torch's scaled_dot_product_attention: with its `is_causal` flag where that is the mask, otherwise with a dense mask.

`is_causal` is aligned to the top left, so it is correct only where queries and keys begin together; a single query at the end
needs no mask. SDPA returns 0 for a query that sees no key (tests/ops/test_sdpa_facts.py). A prefix (ops/attend_sets.py) becomes
keys and values before those of the tokens, which a dense mask shows to every query.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.nn.layout import TokenLayout
from dovetail.nn.view import Scoring
from dovetail.ops.implementation import ProblemSize

OFFERS = frozenset({"bias", "bias_grad", "prefix", "compile"})


def cost(shape: ProblemSize, needs: frozenset[str]) -> float:
    """Nanoseconds, roughly: lowest with the flag, higher with a dense mask, highest with a dense bias."""
    each = 4.6 if shape.plain else 6.7 + 12.0 * ("bias" in needs) + 7.0 * ("bias_grad" in needs)
    return 15_000.0 + each * shape.rows * shape.heads * shape.queries * shape.keys


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scoring: Scoring,
    q_layout: TokenLayout,
    k_layout: TokenLayout,
    visible: tuple[Tensor, Tensor] | str,
    edit: None = None,
) -> Tensor:
    """(…, heads, n, head). `visible` is the flag `all` or `causal`, or the dense mask and the queries that see no key."""
    flat = q.dim() == 3
    if flat:
        q, k, v = q[None], k[None], v[None]
    count = 0 if scoring.prefix is None else len(scoring.prefix[0])
    if scoring.prefix is not None:
        assert not isinstance(visible, str), "a flag says nothing of a prefix"
        k, v = (_behind(learned, x) for learned, x in zip(scoring.prefix, (k, v), strict=True))
        visible = F.pad(visible[0], (count, 0), value=True), visible[1]
    groups, (rows, heads, n, size) = k.shape[-3], q.shape
    grouped = heads != groups
    single = grouped and n == 1 and (isinstance(visible, str) or visible[0].dim() < 3 or visible[0].shape[-3] == 1)
    if single and scoring.bias is None and not count:  # the queries of a group as rows of one matrix: 1.1 to 2.7 times as fast
        mask = None if isinstance(visible, str) else visible[0]
        out = F.scaled_dot_product_attention(q.reshape(rows, groups, -1, size), k, v, mask, scale=scoring.scale)
        out = out.reshape(rows, heads, 1, -1)
        return out[0] if flat else out
    if isinstance(visible, str):
        causal = visible == "causal" and n > 1  # one query at the end sees every key
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scoring.scale, enable_gqa=grouped)
        return out[0] if flat else out
    mask = visible[0]
    if scoring.bias is not None:
        bias = scoring.bias(q_layout, k_layout, *scoring.tables).to(q.dtype)
        mask = torch.where(mask, F.pad(bias, (count, 0)) if count else bias, -torch.inf)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scoring.scale, enable_gqa=grouped)
    out = out.masked_fill(visible[1], 0.0) if count else out  # padding sees the prefix, and gets 0 as without one
    return out[0] if flat else out


def _behind(learned: Tensor, x: Tensor) -> Tensor:
    """Learned entries (p, kv_heads, head), then those of the tokens (rows, kv_heads, m, head)."""
    return torch.cat([learned.transpose(0, 1).to(x.dtype).expand(len(x), -1, -1, -1), x], -2)
