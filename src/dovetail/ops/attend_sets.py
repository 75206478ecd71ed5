"""Sets of rows and heads that are attended to separately, because they do not share tiles.

    a strided mask     its tiles are sorted by residue: rows with different orders are separate
    a mask by head     heads with equal masks are one set, which computes its own tiles only

A kernel computes one set: q (rows, kv_heads, shared, n, head), k, v (rows, kv_heads, m, head) -> z like q, and the log-sum-exp
of the scores (rows, kv_heads, shared, n). A prefix is merged by it, and a learned sink s₀ only rescales:
z · σ(lse − s₀).

A prefix: learned keys and values that every query sees, before those of the tokens. No mask, bias or rotation applies to it.
A position that widens queries widens its keys (`PositionModule.placeless`).

    s_p = cap(q k_pᵀ · scale)                              (…, heads, n, p)       k_p, v_p (p, kv_heads, head)
    z = (e^lse · z + Σ e^s_p v_p) / (e^lse + Σ e^s_p)      from z and lse, attention over the tokens and its log-sum-exp

So a kernel that returns its log-sum-exp needs not know of it, and no key is stored or moved for it.
Sukhbaatar et al. 2019 (persistent memory); Li & Liang 2021 (prefix tuning: trained alone, on a frozen model).
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from dovetail.nn.layout import TokenLayout
from dovetail.nn.module import at_least_fp32
from dovetail.nn.view import Edit, Scoring

Kernel = Callable[..., tuple[Tensor, Tensor]]  # (q, k, v, scoring, edit, *layouts) -> z, lse


def attend_sets(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, edit: Edit | None, *layouts: TokenLayout
) -> Tensor:
    """q (…, heads, n, head), k, v (…, kv_heads, m, head) -> z (…, heads, n, head). The first layout is that of the queries;
    the others are those of the keys, as the kernel takes them."""
    if q.dim() == 3:
        return attend_sets(kernel, q[None], k[None], v[None], scoring, edit, *layouts)[0]
    if scoring.mask.regroup() > 1 and layouts[0].start is None and q.shape[0] > 1:
        rows = [slice(i, i + 1) for i in range(q.shape[0])]
        each = [
            attend_sets(kernel, q[row], k[row], v[row], scoring, edit, *(layout.some_rows(row) for layout in layouts))
            for row in rows
        ]
        return torch.cat(each)
    if scoring.mask.by_head():
        return _by_head(kernel, q, k, v, scoring, edit, *layouts)
    out, lse = kernel(q.unflatten(1, (k.shape[1], -1)), k, v, scoring, edit, *layouts)
    out, lse = out.flatten(1, 2), lse.flatten(1, 2)
    if scoring.prefix is not None:
        seen = lse > torch.finfo(lse.dtype).min / 8  # a query that sees no key is padding, and gets 0
        merged, lse = with_prefix(out, lse, q, scoring)
        out = merged * seen[..., None]
    if scoring.sink is not None:
        out = out * torch.sigmoid(lse - scoring.sink[:, None].to(lse.dtype))[..., None].to(out.dtype)
    return out


def _by_head(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, edit: Edit | None, *layouts: TokenLayout
) -> Tensor:
    """Run heads with equal masks together, so that each set computes only its own tiles."""
    shared, sets = q.shape[1] // k.shape[1], {}
    for i, head in enumerate(scoring.heads.tolist()):
        sets.setdefault(scoring.mask.for_head(head), []).append(i)
    outputs: list[Tensor] = []
    for mask, own in sets.items():
        groups = [i // shared for i in own]
        even = len({groups.count(group) for group in groups}) == 1  # only then can the heads of a set share KV heads
        heads, keys = (torch.tensor(x, device=q.device) for x in (own, sorted(set(groups)) if even else groups))
        own_scoring = dc.replace(
            scoring,
            mask=mask,
            heads=scoring.heads[heads],
            bias=None if scoring.bias is None else partial(_of_heads, scoring.bias, heads),
            sink=None if scoring.sink is None else scoring.sink[heads],
            prefix=None if scoring.prefix is None else (scoring.prefix[0][:, keys], scoring.prefix[1][:, keys]),
        )
        own_edit = None if edit is None else Edit(partial(_edit_heads, edit, heads, q.shape[1]), scales=True)
        k_own, v_own = k.index_select(1, keys), v.index_select(1, keys)
        outputs.append(attend_sets(kernel, q.index_select(1, heads), k_own, v_own, own_scoring, own_edit, *layouts))
    original_order = torch.tensor([i for own in sets.values() for i in own], device=q.device).argsort()
    return torch.cat(outputs, 1).index_select(1, original_order)


def _of_heads(
    bias: Callable[..., Tensor], heads: Tensor, q_layout: TokenLayout, k_layout: TokenLayout, *tables: Tensor
) -> Tensor:
    return bias(q_layout, k_layout, *tables).index_select(-3, heads)


def _edit_heads(edit: Edit, heads: Tensor, count: int, probs: Tensor, q_layout: TokenLayout, k_layout: TokenLayout) -> Tensor:
    """The probs of some of `count` heads; an edit that scales draws for all of them at once."""
    ones = probs.new_ones(*probs.shape[:-3], count, *probs.shape[-2:])
    return probs * edit(ones, q_layout, k_layout).index_select(-3, heads)


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
