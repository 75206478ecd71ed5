"""Streaming positions (StreamingLLM): positions inside a windowed KV cache, so that sequences can be arbitrarily long.

    cache     0 … k−1 │ the last w tokens          k = `keep` and w = `size` of the attention's window
    distance  min(t, k + w − 1) − j                from token t to one of the first k, j < k: at most the size of the cache
              t − j                                from token t to a token of the window, as usual

With absolute positions the distance to the first k tokens would grow beyond every distance of training. This part wraps another
position (`of`: rope, alibi …). With RoPE, R(p) the rotation by position p, each query is rotated twice, by its position in the
sequence and by its position in the cache, and each key has zeros in the half that does not concern it:

    q ← (R(t) q, R(min(t, k + w − 1)) q)          k_j ← (0, R(j) k_j) where j < k, else (R(j) k_j, 0)

so that one product gives the right score for every query. Learned keys (a `prefix` of the attention) stay in the cache as the
first k tokens do, so theirs is the second half: (0, k_p). By default keys are cached without rotation and rotated when read.
Angles are computed in float64: in float32 they are meaningless past ten million tokens. Where the caller gives coordinates,
they take the place of t and j above, and t − min(t, k + w − 1) is subtracted from those of a query.

Shapes: q (…, n, heads, head) -> (…, n, heads, 2·head), k (…, m, kv_heads, head) likewise.     Xiao et al. 2023 (StreamingLLM)
"""

from __future__ import annotations

import torch
from torch import Tensor

from dovetail.nn.groups import Position, PositionModule
from dovetail.nn.layout import TokenLayout
from dovetail.spec.part import Problem, broken, child, register
from dovetail.spec.part_proof import Proof
from dovetail.spec.scope import Scope


@register("streaming")
class Streaming(Position):
    """StreamingLLM: another position, in which the first tokens are never farther away than the size of the cache."""

    of: Position = child("rope", when="read")

    @property
    def rotates(self) -> bool:  # type: ignore[override]
        """Whether the wrapped position rotates."""
        return self.of.rotates

    def coordinates(self) -> int:
        return self.of.coordinates()

    def rotates_on_read(self) -> bool:
        return self.rotates  # the half of a key that concerns a query is chosen on read

    def widens(self, scope: Scope) -> bool:
        return self.twice(scope)

    def twice(self, scope: Scope) -> bool:
        """Whether queries are rotated twice: not without a rotation, and not where the window keeps no first tokens."""
        return self.rotates and scope.size("kept") > 0

    def needs(self) -> frozenset[str]:
        return self.of.needs()

    def cost(self, scope: Scope, n: int) -> tuple[int, int]:
        if not self.twice(scope):
            return 0, 0
        each, full = 2 * scope.size("heads", "head"), min(n, scope.size("cache"))
        learned = n * scope.sizes.get("prefix", 0)  # pairs of a query and a learned key
        return each * (n * n + learned), each * (full * (full + 1) // 2 + (n - full) * full + learned)

    def check(self, scope: Scope) -> list[Problem]:
        window = "give a decoder's attention a window: mask: [causal, {kind: window, size: 256, keep: 4}]"
        return broken(
            ("cache" not in scope.sizes, "", "needs a KV cache of fixed size", window),
            (self.of.site != "mixer", "of", f"{self.of.kind} does not act in attention", "use a position that does: rope"),
            (isinstance(self.of, Streaming), "of", "is itself streaming", "use the position that it wraps: rope"),
        )[:1]


class StreamingProof(Proof, of=Streaming):
    """Sampled values."""

    samples = {"of": [{"kind": "rope", "when": "read"}, "alibi", {"kind": "rope", "base": 100.0}]}


class StreamingModule(PositionModule, of=Streaming):
    """q, k (…, n, heads, head) -> (…, n, heads, 2·head); score -> (…, heads, n, m)."""

    part: Streaming
    of: PositionModule

    def setup(self) -> None:
        self.kept, self.last = self.scope.size("kept"), self.scope.size("cache") - 1
        self.twice, self.count = self.part.twice(self.scope), self.part.coordinates()

    def rotate(self, q: Tensor, layout: TokenLayout) -> Tensor:
        near = self.of.rotate(q, self.in_sequence(layout))
        return torch.cat([near, self.of.rotate(q, self.in_cache(layout))], -1) if self.twice else near

    def on_write(self, k: Tensor, layout: TokenLayout) -> Tensor:
        return self.of.on_write(k, self.in_sequence(layout))

    def on_read(self, k: Tensor, layout: TokenLayout) -> Tensor:
        k = self.of.on_read(k, self.in_sequence(layout))
        if not self.twice:
            return k
        kept = (layout.order < self.kept)[..., None, None]
        return torch.cat([k.masked_fill(kept, 0.0), k.masked_fill(~kept, 0.0)], -1)

    def placeless(self, k: Tensor) -> Tensor:
        k = self.of.placeless(k)
        return torch.cat([torch.zeros_like(k), k], -1) if self.twice else k

    def tables(self) -> tuple[Tensor, ...]:
        return self.of.tables()

    def score(self, q: TokenLayout, k: TokenLayout, *tables: Tensor) -> Tensor:
        near = self.of.score(q, k, *tables)
        if not self.kept:
            return near
        in_cache = TokenLayout.of(q.order.clamp_max(self.last), q.seg, q.row)
        return torch.where((k.order < self.kept)[..., None, None, :], self.of.score(in_cache, k, *tables), near)

    def in_sequence(self, layout: TokenLayout) -> TokenLayout:
        """The same tokens with positions in float64."""
        return layout.once(("in sequence", self.count), lambda: self.before(layout, layout.order))

    def in_cache(self, layout: TokenLayout) -> TokenLayout:
        """The same tokens with their positions in the cache when they are appended."""
        return layout.once(("in cache", self.last, self.count), lambda: self.before(layout, layout.order.clamp_max(self.last)))

    def before(self, layout: TokenLayout, order: Tensor) -> TokenLayout:
        """The same tokens with other orders (…, n) in float64, and coordinates as much smaller."""
        coords = layout.coords_for(self.count) - (layout.order - order)[..., None]
        return TokenLayout(coords.double(), order.double(), layout.seg, layout.row)
