"""Tokens in blocks of a fixed size, counted from the beginning of each document; and attention to a few picked blocks.

    block of a token = ⌊order / size⌋          a block is whole when its last token, (number + 1)·size − 1, has come

A block knows its document, never its row or its call: documents may be packed, padded, flat, remembered or on other ranks, so
tokens are looked up by (document, order). Attention to picked blocks in two forms:

    dense      every key, those of other blocks masked: as it is written on paper
    gathered   the keys of the picked blocks alone, some queries at a time: cost goes with what is picked, not with the text

Shapes: q (…, n, heads, head)   k, v (…, m, kv_heads, head)   picked (…, kv_heads, n, s) numbers of blocks, −1 for none.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dovetail.core.layout import TokenLayout
from dovetail.core.module import at_least_fp32
from dovetail.ops.form import chunk, reference
from dovetail.ops.mask import same_document

LONGEST = 2**32  # tokens a document may have


class Ended(NamedTuple):
    """The blocks that end among some tokens."""

    layout: TokenLayout  # order is a block's number in its document
    tokens: Tensor  # (…, b, size) where its tokens stand among the keys


def ended(layout: TokenLayout, key_layout: TokenLayout, size: int) -> Ended:
    """The blocks whose last token is one of those at `at`, their tokens looked up among the keys; once a step."""
    return key_layout.once_for(layout, ("ended", size), _ended, layout, key_layout, size)


def _ended(layout: TokenLayout, key_layout: TokenLayout, size: int) -> Ended:
    last = layout.real & ((layout.order + 1) % size == 0)
    if layout.row is not None:  # as many as there are: a flat batch may end a block with every token
        blocks = layout.pick(last.nonzero().squeeze(-1))
        blocks = TokenLayout.of(blocks.order // size, blocks.seg, blocks.row)
    else:
        # known without looking, or as many as can be: a row's first block may have begun before it
        most = -(-layout.n // size) if layout.start is None else (layout.start + layout.n) // size - layout.start // size
        where = (~last).to(torch.uint8).argsort(dim=-1, stable=True)[..., :most]
        seg = torch.where(last.gather(-1, where), layout.seg.gather(-1, where), -1)
        blocks = TokenLayout.of(layout.order.gather(-1, where) // size, seg)
    orders = blocks.order[..., None] * size + torch.arange(size, device=layout.order.device)
    tokens, _ = find(key_layout, _document(blocks)[..., None].expand_as(orders), orders)
    return Ended(blocks, tokens)


def _document(layout: TokenLayout) -> Tensor:
    """(…, n) a number for each document of a row; in a flat batch a row is one document."""
    return layout.seg if layout.row is None else torch.where(layout.real, layout.row, -1)


def find(layout: TokenLayout, document: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """Where the tokens of these documents and orders (…, any) stand among those at `at`, and whether they are there at all."""
    names, places = layout.once("by document and order", lambda: (_document(layout) * LONGEST + layout.order).sort(-1))
    wanted = (document * LONGEST + order).flatten(names.dim() - 1).contiguous()
    found = torch.searchsorted(names, wanted).clamp_max(layout.n - 1)
    here = (names.gather(-1, found) == wanted) & (wanted >= 0)
    return places.gather(-1, found).view_as(order), here.view_as(order)


def log_softmax_where(scores: Tensor, seen: Tensor) -> Tensor:
    """Logarithms of weights over the last dimension, −∞ for what may not be seen."""
    scores = scores.to(at_least_fp32(scores.dtype)).masked_fill(~seen, -torch.inf)
    empty = ~seen.any(-1, keepdim=True)
    return torch.log_softmax(scores.masked_fill(empty, 0.0), -1).masked_fill(empty, -torch.inf)


def softmax_where(scores: Tensor, seen: Tensor) -> Tensor:
    """Weights over the last dimension, zero where nothing may be seen at all."""
    return log_softmax_where(scores, seen).exp()


def attend_picked(
    q: Tensor, k: Tensor, v: Tensor, picked: Tensor, size: int, scale: float, layout: TokenLayout, key_layout: TokenLayout
) -> Tensor:
    """Attention of each query to the tokens of its picked blocks that came before it, and itself: (…, n, heads, head)."""
    groups = k.shape[-2]
    q = q.unflatten(-2, (groups, -1)).movedim(-4, -2)  # (…, kv_heads, shared, n, head)
    k, v = k.transpose(-3, -2), v.transpose(-3, -2)
    form = dense if reference() or picked.shape[-1] * size >= key_layout.n else gathered
    return form(q, k, v, picked, size, scale, layout, key_layout).movedim(-2, -4).flatten(-3, -2)


def dense(
    q: Tensor, k: Tensor, v: Tensor, picked: Tensor, size: int, scale: float, layout: TokenLayout, key_layout: TokenLayout
) -> Tensor:
    """Every key, those not picked masked: (…, kv_heads, shared, n, head)."""
    earlier = same_document(layout, key_layout) & (key_layout.order[..., None, :] <= layout.order[..., :, None])
    block = (key_layout.order // size)[..., None, None, :]
    chosen = torch.zeros((), dtype=torch.bool, device=q.device)
    for i in range(picked.shape[-1]):
        chosen = chosen | (picked[..., i, None] == block)
    seen = (chosen & earlier[..., None, :, :]).unsqueeze(-3)
    score_dtype = at_least_fp32(q.dtype)
    weights = softmax_where(q.to(score_dtype) @ k.to(score_dtype).unsqueeze(-3).transpose(-1, -2) * scale, seen)
    return weights.to(v.dtype) @ v.unsqueeze(-3)


def gathered(
    q: Tensor, k: Tensor, v: Tensor, picked: Tensor, size: int, scale: float, layout: TokenLayout, key_layout: TokenLayout
) -> Tensor:
    """The keys that are picked and no others, `chunk()` queries at a time: (…, kv_heads, shared, n, head)."""
    found: list[Tensor] = []
    document = _document(layout)
    for begin in range(0, layout.n, chunk()):
        some = slice(begin, begin + chunk())
        orders = (picked[..., some, :, None] * size + torch.arange(size, device=q.device)).flatten(-2)
        whose = document[..., None, some, None].expand_as(orders)
        # what none picked (−1) lies before the document's beginning, and is not found
        index, here = find(key_layout, torch.where(orders < 0, -1, whose), orders)
        seen = here & (orders <= layout.order[..., None, some, None])
        flat = index.flatten(-2)[..., None]
        keys, values = (
            x.gather(-2, flat.expand(*flat.shape[:-1], x.shape[-1])).unflatten(-2, index.shape[-2:]) for x in (k, v)
        )
        score_dtype = at_least_fp32(q.dtype)
        scores = torch.einsum("...gsnd,...gnkd->...gsnk", q[..., some, :].to(score_dtype), keys.to(score_dtype)) * scale
        weights = softmax_where(scores, seen.unsqueeze(-3))
        found.append(torch.einsum("...gsnk,...gnkd->...gsnd", weights.to(v.dtype), values))
    return torch.cat(found, -2)
