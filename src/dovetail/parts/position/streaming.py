"""Streaming: positions counted inside a cache of fixed size, so that a text may go on for ever.

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

from dovetail.core.at import At
from dovetail.core.env import Env
from dovetail.core.group import Position, PositionModule
from dovetail.core.module import Module
from dovetail.core.part import Problem, child, register


@register("streaming")
class Streaming(Position):
    """Another position, with kept tokens never farther away than the cache is long."""

    of: Position = child("rope", when="read")

    @property
    def rotates(self) -> bool:  # type: ignore[override]
        """As what it counts for does."""
        return self.of.rotates

    def module(self) -> type[Module]:
        return StreamingModule

    def twice(self, env: Env) -> bool:
        """Whether queries turn twice: nothing is to be told apart where nothing turns, or no token is kept."""
        return self.rotates and env.size("kept") > 0

    def needs(self) -> frozenset[str]:
        return self.of.needs()

    def cost(self, env: Env, n: int) -> tuple[int, int]:
        if not self.twice(env):
            return 0, 0
        each, full = 2 * env.size("heads", "head"), min(n, env.size("cache"))
        return each * n * n, each * (full * (full + 1) // 2 + (n - full) * full)

    def check(self, env: Env) -> list[Problem]:
        if "cache" not in env.sizes:
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
        self.kept, self.last = self.env.size("kept"), self.env.size("cache") - 1
        self.twice = self.part.twice(self.env)

    def rotate(self, q: Tensor, at: At) -> Tensor:
        near = self.of.rotate(q, self.in_text(at))
        return torch.cat([near, self.of.rotate(q, self.in_cache(at))], -1) if self.twice else near

    def on_write(self, k: Tensor, at: At) -> Tensor:
        return self.of.on_write(k, self.in_text(at))

    def on_read(self, k: Tensor, at: At) -> Tensor:
        k = self.of.on_read(k, self.in_text(at))
        if not self.twice:
            return k
        kept = (at.order < self.kept)[..., None, None]
        return torch.cat([k.masked_fill(kept, 0.0), k.masked_fill(~kept, 0.0)], -1)

    def tables(self) -> tuple[Tensor, ...]:
        return self.of.tables()

    def score(self, q: At, k: At, *tables: Tensor) -> Tensor:
        near = self.of.score(q, k, *tables)
        if not self.kept:
            return near
        ranked = At.of(q.order.clamp_max(self.last), q.seg, q.row)
        return torch.where((k.order < self.kept)[..., None, None, :], self.of.score(ranked, k, *tables), near)

    def in_text(self, at: At) -> At:
        """The same tokens, counted in float64."""
        return at.once("in text", lambda: At.of(at.order.double(), at.seg, at.row))

    def in_cache(self, at: At) -> At:
        """Each token as it stands in the cache at the moment it comes."""
        return at.once(("in cache", self.last), lambda: At.of(at.order.clamp_max(self.last).double(), at.seg, at.row))
