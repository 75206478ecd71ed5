"""Masks by order and distance: causal, window, prefix, global tokens, block-local.

    causal         k ≤ q
    window         |q − k| < size, or k < keep       size counts the token itself: with 4, position 9 sees 6, 7, 8, 9
    prefix         k < length                        joined with causal by |: the prefix is bidirectional (T5's prefix LM)
    global_tokens  q < tokens or k < tokens          Beltagy et al. 2020 (Longformer); Zaheer et al. 2020 (BigBird)
    block_local    |⌊q/size⌋ − ⌊k/size⌋| ≤ back      the token's own block and `back` blocks on either side

q and k are positions within a document.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from dovetail.nn.groups import Band, Fill, Mask, Order, Span
from dovetail.nn.layout import TokenLayout
from dovetail.spec.field import bounded
from dovetail.spec.part import register
from dovetail.spec.part_proof import FieldCause, Proof


def distance(q: TokenLayout, k: TokenLayout) -> Tensor:
    """(…, 1, n, m) order of the query minus order of the key."""
    return (q.order[..., :, None] - k.order[..., None, :])[..., None, :, :]


def _within(low: int, high: int, least: int, most: int) -> Fill:
    """How many of the integers in [low, high] are in [least, most]: all, none or some."""
    if high < least or low > most:
        return Fill.EMPTY
    return Fill.FULL if least <= low and high <= most else Fill.PART


@register("causal")
class Causal(Mask):
    """The token itself and those before it."""

    def visible(self, q: TokenLayout, k: TokenLayout, heads: Tensor) -> Tensor:
        return distance(q, k) >= 0

    def tile(self, q: Span, k: Span, head: int) -> Fill:
        if k.low > q.high:
            return Fill.EMPTY
        return Fill.FULL if k.high <= q.low else Fill.PART

    def order(self) -> Order:
        return "causal"

    def flag(self) -> Literal["all", "causal"] | None:
        return "causal"

    def band(self) -> Band | None:
        return Band(None, 0)


@register("window")
class Window(Mask):
    """Sliding window of `size` tokens, the query included, and the first `keep` (Beltagy et al. 2020; Xiao et al. 2023)."""

    size: int = bounded(256, above=0)
    keep: int = bounded(0, at_least=0)

    def visible(self, q: TokenLayout, k: TokenLayout, heads: Tensor) -> Tensor:
        near = distance(q, k).abs() < self.size
        return near | (k.order < self.keep)[..., None, None, :] if self.keep else near

    def tile(self, q: Span, k: Span, head: int) -> Fill:
        near = _within(q.low - k.high, q.high - k.low, 1 - self.size, self.size - 1)
        kept = _within(k.low, k.high, 0, self.keep - 1)
        return max(near, kept, key=lambda fill: fill.value)

    def reach(self) -> int | None:
        return self.size

    def kept(self) -> int:
        return self.keep

    def band(self) -> Band | None:
        return None if self.keep else Band(self.size - 1, self.size - 1)


class WindowProof(Proof, of=Window):
    """Sampled values and causes."""

    causes = {"size": FieldCause("window size")}
    samples = {"size": [5, 8], "keep": [0, 2]}


@register("prefix")
class Prefix(Mask):
    """Prefix LM: every query sees the first `length` tokens; join it with causal by `any`."""

    joins: ClassVar[Literal["all", "any"]] = "any"
    length: int = bounded(64, above=0)

    def visible(self, q: TokenLayout, k: TokenLayout, heads: Tensor) -> Tensor:
        shape = torch.broadcast_shapes(q.order.shape[:-1], k.order.shape[:-1])
        return (k.order < self.length)[..., None, None, :].expand(*shape, 1, q.n, k.n)

    def tile(self, q: Span, k: Span, head: int) -> Fill:
        return _within(k.low, k.high, 0, self.length - 1)

    def ahead(self) -> int | None:
        return self.length

    def reach(self) -> int | None:
        return self.length

    def kept(self) -> int:
        return self.length


class PrefixProof(Proof, of=Prefix):
    """Sampled values."""

    samples = {"length": [4, 7]}


@register("global_tokens")
class GlobalTokens(Mask):
    """Global tokens: the first `tokens` see every token, and every token sees them."""

    tokens: int = bounded(1, above=0)

    def visible(self, q: TokenLayout, k: TokenLayout, heads: Tensor) -> Tensor:
        return ((q.order < self.tokens)[..., :, None] | (k.order < self.tokens)[..., None, :])[..., None, :, :]

    def tile(self, q: Span, k: Span, head: int) -> Fill:
        by_query, by_key = (_within(s.low, s.high, 0, self.tokens - 1) for s in (q, k))
        return max(by_query, by_key, key=lambda fill: fill.value)

    def reach(self) -> int | None:
        return self.tokens

    def kept(self) -> int:
        return self.tokens


class GlobalTokensProof(Proof, of=GlobalTokens):
    """Sampled values."""

    samples = {"tokens": [2, 5]}


@register("block_local")
class BlockLocal(Mask):
    """Block-local attention: the token's own block and `back` blocks on either side."""

    size: int = bounded(64, above=0)
    back: int = bounded(0, at_least=0)

    def visible(self, q: TokenLayout, k: TokenLayout, heads: Tensor) -> Tensor:
        apart = (q.order // self.size)[..., :, None] - (k.order // self.size)[..., None, :]
        return (apart.abs() <= self.back)[..., None, :, :]

    def tile(self, q: Span, k: Span, head: int) -> Fill:
        low, high = q.low // self.size - k.high // self.size, q.high // self.size - k.low // self.size
        return _within(low, high, -self.back, self.back)

    def reach(self) -> int | None:
        return self.size * (self.back + 1)


class BlockLocalProof(Proof, of=BlockLocal):
    """Sampled values."""

    samples = {"size": [4, 6], "back": [0, 1]}
