"""Pooling: one vector per document from its real tokens alone: the first, the last, or their mean.

batch, one document per row at most    (batch, n, embed) -> (batch, embed); zeros for `mean` of an empty row
packed, several documents in a row     (batch, n, embed) -> (documents, embed), those of the first row first
flat                                   (n, embed)        -> (rows, embed)

A mean is computed in float32 or wider, and rounded once.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

from dovetail.nn.layout import TokenLayout
from dovetail.nn.module import at_least_fp32

Pool = Literal["first", "last", "mean"]


def pool(x: Tensor, layout: TokenLayout, pooling: Pool) -> Tensor:
    """(…, n, embed) -> (documents, embed) over the real tokens of each document; (batch, embed) where a row has one."""
    documents = layout.once(documents_of, lambda: documents_of(layout))
    if documents is not None:
        return _pool_each(x, *documents, pooling)
    real = layout.real
    if pooling == "mean":
        wide = at_least_fp32(x.dtype)
        weight = real.to(wide)[..., None]
        return ((x * weight).sum(-2) / weight.sum(-2).clamp_min(1)).to(x.dtype)
    place = torch.arange(layout.n, device=x.device)
    index = torch.where(real, place, layout.n).amin(-1) if pooling == "first" else torch.where(real, place, -1).amax(-1)
    index = index.clamp(0, layout.n - 1)
    return x.gather(-2, index[..., None, None].expand(*index.shape, 1, x.shape[-1])).squeeze(-2)


def documents_of(layout: TokenLayout) -> tuple[Tensor, int] | None:
    """The document of each token, counted over the whole batch, −1 at padding; and how many there are. None: at most one per
    row of a batch."""
    if layout.row is not None:
        return torch.where(layout.real, layout.row, -1), layout.rows
    counts = layout.documents
    if max(counts, default=1) == 1:
        return None
    first = torch.tensor([0, *accumulate(counts)][:-1], device=layout.order.device)
    return torch.where(layout.real, layout.seg + first[:, None], -1).flatten(), sum(counts)


def _pool_each(x: Tensor, document: Tensor, documents: int, pooling: Pool) -> Tensor:
    """(documents, embed) from x (…, n, embed) and the document of each token (tokens,), −1 for none."""
    x, slot = x.reshape(-1, x.shape[-1]), document % (documents + 1)  # padding goes to one slot more, which is dropped
    if pooling == "mean":
        wide = at_least_fp32(x.dtype)
        total = x.new_zeros(documents + 1, x.shape[-1], dtype=wide).index_add(0, slot, x.to(wide))[:documents]
        count = total.new_zeros(documents + 1).index_add(0, slot, torch.ones_like(slot, dtype=wide))[:documents, None]
        return (total / count.clamp_min(1)).to(x.dtype)
    place, none = torch.arange(len(slot), device=x.device), len(slot) if pooling == "first" else -1
    index = torch.full((documents + 1,), none, device=x.device)
    index = index.scatter_reduce(0, slot, place, "amin" if pooling == "first" else "amax")[:documents]
    return x[index.clamp(0, len(slot) - 1)]
