"""Blocks of tokens, counted from the beginning of each document, and attention to a few picked blocks per query.

    block of a token = ⌊order / size⌋          a block is complete with its last token, whose order is (number + 1)·size − 1

Documents may be packed, padded, flat, cached or split across ranks, so the tokens of a block are looked up by (document,
order), not by their place in a row. Attention to picked blocks has two forms:

    dense      all keys, with those of other blocks masked: the reference implementation
    gathered   the keys of the picked blocks only, a chunk of queries at a time: the cost does not grow with the sequence

Shapes: q (…, n, heads, head)   k, v (…, m, kv_heads, head)   picked (…, kv_heads, n, s) numbers of blocks, −1 for none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dovetail.nn.layout import TokenLayout
from dovetail.nn.module import at_least_fp32
from dovetail.ops.implementation import chunk, reference
from dovetail.ops.mask import same_document

LONGEST = 2**32  # most tokens per document


class Ended(NamedTuple):
    """The blocks that end among some tokens."""

    layout: TokenLayout  # of the blocks: `order` is a block's number in its document
    tokens: Tensor  # (…, b, size) indices of its tokens among the keys


def ended(layout: TokenLayout, key_layout: TokenLayout, size: int) -> Ended:
    """The blocks whose last token is in `layout`, with their tokens looked up among the keys; computed once per step."""
    return key_layout.once_for(layout, ("ended", size), _ended, layout, key_layout, size)


def _ended(layout: TokenLayout, key_layout: TokenLayout, size: int) -> Ended:
    last = layout.real & ((layout.order + 1) % size == 0)
    if layout.row is not None:  # exactly those that end: a flat batch may end a block with every token
        spans = layout.known.spans
        index = last.nonzero().squeeze(-1) if spans is None else torch.tensor(_last_tokens(spans, size), device=last.device)
        blocks = layout.pick(index.long())
        blocks = TokenLayout.of(blocks.order // size, blocks.seg, blocks.row)
    else:
        # The exact number where `start` is known, else the most possible: a row's first block may have begun before this call.
        # In a compiled graph the number must not depend on where the step begins.
        start = None if torch.compiler.is_compiling() else layout.start
        most = -(-layout.n // size) if start is None else (start + layout.n) // size - start // size
        index = (~last).to(torch.uint8).argsort(dim=-1, stable=True)[..., :most]
        seg = torch.where(last.gather(-1, index), layout.seg.gather(-1, index), -1)
        blocks = TokenLayout.of(layout.order.gather(-1, index) // size, seg)
    orders = blocks.order[..., None] * size + torch.arange(size, device=layout.order.device)
    tokens, _ = find(key_layout, _document(blocks)[..., None].expand_as(orders), orders)
    return Ended(blocks, tokens)


def _last_tokens(spans: Sequence[tuple[int, int]], size: int) -> list[int]:
    """The indices of the tokens that end a block, in a flat batch of rows from `start` on, one behind the other."""
    found, begin = list[int](), 0
    for start, tokens in spans:
        found += [begin + i for i in range(tokens) if (start + i + 1) % size == 0]
        begin += tokens
    return found


def _document(layout: TokenLayout) -> Tensor:
    """(…, n) a number for each document of a row; in a flat batch a row is one document."""
    return layout.seg if layout.row is None else torch.where(layout.real, layout.row, -1)


def find(layout: TokenLayout, document: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """The indices in `layout` of the tokens with these documents and orders (…, any), and whether each is there."""
    ids, places = layout.once("by document and order", lambda: (_document(layout) * LONGEST + layout.order).sort(-1))
    wanted = (document * LONGEST + order).flatten(ids.dim() - 1).contiguous()
    index = torch.searchsorted(ids, wanted).clamp_max(layout.n - 1)
    present = (ids.gather(-1, index) == wanted) & (wanted >= 0)
    return places.gather(-1, index).view_as(order), present.view_as(order)


def log_softmax_where(scores: Tensor, visible: Tensor) -> Tensor:
    """Log-probs over the last dimension, −∞ for keys that are not visible."""
    scores = scores.to(at_least_fp32(scores.dtype)).masked_fill(~visible, -torch.inf)
    empty = ~visible.any(-1, keepdim=True)
    return torch.log_softmax(scores.masked_fill(empty, 0.0), -1).masked_fill(empty, -torch.inf)


def softmax_where(scores: Tensor, visible: Tensor) -> Tensor:
    """Probs over the last dimension, all zero where no key is visible."""
    return log_softmax_where(scores, visible).exp()


def attend_picked(
    q: Tensor, k: Tensor, v: Tensor, picked: Tensor, size: int, scale: float, layout: TokenLayout, key_layout: TokenLayout
) -> Tensor:
    """Attention of each query to the earlier tokens of its picked blocks and to itself: (…, n, heads, head)."""
    groups = k.shape[-2]
    q = q.unflatten(-2, (groups, -1)).movedim(-4, -2)  # (…, kv_heads, shared, n, head)
    k, v = k.transpose(-3, -2), v.transpose(-3, -2)
    few = torch.compiler.is_compiling() or picked.shape[-1] * size < key_layout.n  # compiled: one graph for all lengths
    form = gathered if few and not reference() else dense
    return form(q, k, v, picked, size, scale, layout, key_layout).movedim(-2, -4).flatten(-3, -2)


def dense(
    q: Tensor, k: Tensor, v: Tensor, picked: Tensor, size: int, scale: float, layout: TokenLayout, key_layout: TokenLayout
) -> Tensor:
    """Attention over all keys, with those of other blocks masked: (…, kv_heads, shared, n, head)."""
    earlier = same_document(layout, key_layout) & (key_layout.order[..., None, :] <= layout.order[..., :, None])
    block = (key_layout.order // size)[..., None, None, :]
    chosen = torch.zeros((), dtype=torch.bool, device=q.device)
    for i in range(picked.shape[-1]):
        chosen = chosen | (picked[..., i, None] == block)
    visible = (chosen & earlier[..., None, :, :]).unsqueeze(-3)
    score_dtype = at_least_fp32(q.dtype)
    probs = softmax_where(q.to(score_dtype) @ k.to(score_dtype).unsqueeze(-3).transpose(-1, -2) * scale, visible)
    return probs.to(v.dtype) @ v.unsqueeze(-3)


def gathered(
    q: Tensor, k: Tensor, v: Tensor, picked: Tensor, size: int, scale: float, layout: TokenLayout, key_layout: TokenLayout
) -> Tensor:
    """Attention over the gathered keys of picked blocks, `chunk()` queries at a time: (…, kv_heads, shared, n, head)."""
    outputs: list[Tensor] = []
    document = _document(layout)
    for begin in range(0, layout.n, chunk()):
        queries = slice(begin, begin + chunk())
        orders = (picked[..., queries, :, None] * size + torch.arange(size, device=q.device)).flatten(-2)
        own = document[..., None, queries, None].expand_as(orders)
        # −1 (no block) gives orders below 0, which no token has
        index, present = find(key_layout, torch.where(orders < 0, -1, own), orders)
        visible = present & (orders <= layout.order[..., None, queries, None])
        flat = index.flatten(-2)[..., None]
        keys, values = (
            x.gather(-2, flat.expand(*flat.shape[:-1], x.shape[-1])).unflatten(-2, index.shape[-2:]) for x in (k, v)
        )
        score_dtype = at_least_fp32(q.dtype)
        scores = torch.einsum("...gsnd,...gnkd->...gsnk", q[..., queries, :].to(score_dtype), keys.to(score_dtype)) * scale
        probs = softmax_where(scores, visible.unsqueeze(-3))
        outputs.append(torch.einsum("...gsnk,...gnkd->...gsnd", probs.to(v.dtype), values))
    return torch.cat(outputs, -2)
