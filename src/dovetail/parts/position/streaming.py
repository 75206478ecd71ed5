"""Streaming positions (StreamingLLM): counted inside a KV cache of fixed size, so that a text has no longest length.

    cache     0 … k−1 │ the last w tokens          k = `keep` and w = `size` of the attention's window
    distance  min(t, k + w − 1) − j                from token t to a kept one, j < k: at most as far as the cache is long
              t − j                                to a token of the window: in the cache as in the text

A plain position would put kept tokens farther and farther away, past any distance the model was trained on. Here another
position (`of`: rope, alibi …) is asked twice: a query turns as it stands in the text and as it stands in the cache, side by
side, and a key answers to one of the two,

    q ← (R(t) q, R(min(t, k + w − 1)) q)          k_j ← (0, R(j) k_j) where j < k, else (R(j) k_j, 0)

so that the product is exact for one query or many at once. Keys are remembered unturned by default and turn when read. Angles
are computed in float64: past ten million tokens float32 would turn by anything.

Shapes: q (…, n, heads, head) -> (…, n, heads, 2·head), k (…, m, kv_heads, head) likewise.     Xiao et al. 2023 (StreamingLLM)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dovetail.core.group import Position, PositionModule
from dovetail.core.layout import TokenLayout
from dovetail.core.module import Module
from dovetail.core.part import Problem, child, register
from dovetail.core.scope import Scope


@register("streaming")
class Streaming(Position):
    """StreamingLLM: another position, in which the first tokens are never farther away than the size of the cache."""

    of: Position = child("rope", when="read")

    @property
    def rotates(self) -> bool:  # type: ignore[override]
        """Whether the wrapped position rotates."""
        return self.of.rotates

    def module(self) -> type[Module]:
        return StreamingModule

    def twice(self, scope: Scope) -> bool:
        """Whether queries turn twice: nothing is to be told apart where nothing turns, or no token is kept."""
        return self.rotates and scope.size("kept") > 0

    def needs(self) -> frozenset[str]:
        return self.of.needs()

    def cost(self, scope: Scope, n: int) -> tuple[int, int]:
        if not self.twice(scope):
            return 0, 0
        each, full = 2 * scope.size("heads", "head"), min(n, scope.size("cache"))
        return each * n * n, each * (full * (full + 1) // 2 + (n - full) * full)

    def check(self, scope: Scope) -> list[Problem]:
        if "cache" not in scope.sizes:
            what = "there is no cache of fixed size to count in"
            return [
                Problem("", what, "give a decoder's attention a window: mask: [causal, {kind: window, size: 256, keep: 4}]")
            ]
        if self.of.site != "mixer":
            return [
                Problem("of", f"{self.of.kind} knows no distance between tokens", "use one that acts inside attention: rope")
            ]
        if isinstance(self.of, Streaming):
            return [Problem("of", "counts in the cache already", "name the position itself: rope")]
        return []

    @classmethod
    def samples(cls) -> dict[str, list[Any]]:
        return {"of": [{"kind": "rope", "when": "read"}, "alibi", {"kind": "rope", "base": 100.0}]}


class StreamingModule(PositionModule):
    """q, k (…, n, heads, head) -> (…, n, heads, 2·head); score -> (…, heads, n, m)."""

    part: Streaming
    of: PositionModule

    def setup(self) -> None:
        self.kept, self.last = self.scope.size("kept"), self.scope.size("cache") - 1
        self.twice = self.part.twice(self.scope)

    def rotate(self, q: Tensor, layout: TokenLayout) -> Tensor:
        near = self.of.rotate(q, self.in_text(layout))
        return torch.cat([near, self.of.rotate(q, self.in_cache(layout))], -1) if self.twice else near

    def on_write(self, k: Tensor, layout: TokenLayout) -> Tensor:
        return self.of.on_write(k, self.in_text(layout))

    def on_read(self, k: Tensor, layout: TokenLayout) -> Tensor:
        k = self.of.on_read(k, self.in_text(layout))
        if not self.twice:
            return k
        kept = (layout.order < self.kept)[..., None, None]
        return torch.cat([k.masked_fill(kept, 0.0), k.masked_fill(~kept, 0.0)], -1)

    def tables(self) -> tuple[Tensor, ...]:
        return self.of.tables()

    def score(self, q: TokenLayout, k: TokenLayout, *tables: Tensor) -> Tensor:
        near = self.of.score(q, k, *tables)
        if not self.kept:
            return near
        ranked = TokenLayout.of(q.order.clamp_max(self.last), q.seg, q.row)
        return torch.where((k.order < self.kept)[..., None, None, :], self.of.score(ranked, k, *tables), near)

    def in_text(self, layout: TokenLayout) -> TokenLayout:
        """The same tokens, counted in float64."""
        return layout.once("in text", lambda: TokenLayout.of(layout.order.double(), layout.seg, layout.row))

    def in_cache(self, layout: TokenLayout) -> TokenLayout:
        """Each token as it stands in the cache at the moment it comes."""
        return layout.once(
            ("in cache", self.last), lambda: TokenLayout.of(layout.order.clamp_max(self.last).double(), layout.seg, layout.row)
        )
