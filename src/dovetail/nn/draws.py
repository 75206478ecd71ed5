"""Draws: dropout and noise of a training pass.

    keep = word(seed, path, sample, position, channel) ≥ p · 2³²          y = x · keep / (1 − p)

Every number is a function of (seed, path, sample, position, channel), see nn/random.py. Sample and position come from the
layout, the global channel from the declared axes and this rank's place among them. So padded, packed and flat batches,
tensor-parallel ranks and pieces of a split sequence all draw the same masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dovetail.nn.layout import TokenLayout
from dovetail.nn.random import draw, normals, streams, words

if TYPE_CHECKING:
    from dovetail.nn.ctx import Ctx
    from dovetail.nn.ranks import Placed


class Draws:
    """The random numbers of one pass; `ctx.draws` is None outside training."""

    __slots__ = ("seed",)

    def __init__(self, seed: int | Tensor) -> None:
        self.seed = seed if isinstance(seed, Tensor) else torch.tensor(seed)  # (), see nn/random.py

    def dropout(
        self, ctx: Ctx, x: Tensor, p: float, module: Placed, name: str = "", axes: Sequence[str] = ("embed",)
    ) -> Tensor:
        """Set values of x to 0 with probability p and scale the others by 1/(1 − p).

        x is (…, n, channels), or (answers, channels) with one answer per sample; `axes` are the logical axes of the channels.
        """
        if p == 0.0:
            return x
        bits = self._bits(ctx, x, module, name, axes)
        return _drop(x, torch.stack(words(bits), -1), p, ctx.ranks.first(module, axes, x.shape[-1]))

    def dropout_rows(
        self, ctx: Ctx, x: Tensor, p: float, module: Placed, name: str, axes: Sequence[str], token: Tensor, expert: Tensor
    ) -> Tensor:
        """The same for rows (rows, channels) that experts read, by (sample, position, expert, channel): `token` (rows,) is the
        number of each row's token in the layout, `expert` (rows,) that of its expert among all."""
        if p == 0.0:
            return x
        sample, position = (per_token.flatten().index_select(0, token) for per_token in (ctx.layout.sample, ctx.layout.order))
        first = ctx.ranks.first(module, axes, x.shape[-1])
        pairs = _pairs(first, x.shape[-1], x.device)
        bits = draw(self._stream(module, name), *(per_row[:, None] for per_row in (sample, position, expert)), pairs)
        return _drop(x, torch.stack(words(bits), -1), p, first)

    def dropout_probs(
        self, ctx: Ctx, probs: Tensor, p: float, module: Placed, name: str, q_layout: TokenLayout, k_layout: TokenLayout
    ) -> Tensor:
        """The same for attention probs (…, heads, n, m), by (sample, query position, key position, head)."""
        if p == 0.0:
            return probs
        heads = probs.shape[-3]
        first = ctx.ranks.first(module, ("heads",), heads)
        sample, q = (per_query[..., None, :, None] for per_query in (q_layout.sample, q_layout.order))
        keys, pairs = k_layout.order[..., None, None, :], _pairs(first, heads, probs.device)[:, None, None]
        bits = draw(self._stream(module, name), sample, q, keys, pairs)
        return _drop(probs.movedim(-3, -1), torch.stack(words(bits), -1).movedim(-4, -2), p, first).movedim(-1, -3)

    def noise(
        self, ctx: Ctx, x: Tensor, std: float, module: Placed, name: str = "", axes: Sequence[str] = ("embed",)
    ) -> Tensor:
        """Add normal noise to x (…, n, channels)."""
        if std == 0.0:
            return x
        both = torch.stack(normals(self._bits(ctx, x, module, name, axes)), -1)
        return x + (std * _slice(both, ctx.ranks.first(module, axes, x.shape[-1]), x.shape[-1])).to(x.dtype)

    def _stream(self, module: Placed, name: str) -> Tensor:
        return streams(self.seed, [f"{module.path}.{name}"])[0]

    def _bits(self, ctx: Ctx, x: Tensor, module: Placed, name: str, axes: Sequence[str]) -> Tensor:
        """64 random bits (…, n, pairs) for each pair of channels of x."""
        sample, position = ctx.layout.sample, ctx.layout.order
        if x.shape[:-1] != position.shape:  # one answer per sample
            sample = ctx.layout.sample.amin() + torch.arange(x.shape[0], device=x.device)
            position = torch.zeros_like(sample)
        pairs = _pairs(ctx.ranks.first(module, axes, x.shape[-1]), x.shape[-1], x.device)
        return draw(self._stream(module, name), sample[..., None], position[..., None], pairs)


def _pairs(first: int, size: int, device: torch.device) -> Tensor:
    """The numbers of the pairs that cover channels first … first + size − 1."""
    return torch.arange(first // 2, (first + size + 1) // 2, device=device)


def _slice(both: Tensor, first: int, size: int) -> Tensor:
    """(…, pairs, 2) -> (…, size): the channels from `first` on."""
    return both.flatten(-2)[..., first % 2 : first % 2 + size]


def _drop(x: Tensor, both: Tensor, p: float, first: int) -> Tensor:
    """x (…, channels) with values dropped where the random 32-bit word (…, pairs, 2) is below p."""
    keep = _slice(both, first, x.shape[-1]) >= int(p * 2**32)
    return x * keep.to(x.dtype) / (1.0 - p)
