"""Oracles of short_conv: a few tokens by hand."""

from __future__ import annotations

from collections.abc import Iterator

from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout
from dovetail.proof.laws.oracle import Comparison, alone, ctx, numbers, oracle, part


@oracle("short_conv")
def gated_convolution() -> Iterator[Comparison]:
    """b = x, c = 2x, u = 3x, and a kernel (1, 10) whose last tap is the token itself: b ∘ u is 3, 12, 27."""
    weights = {"b.weight": [[1.0]], "c.weight": [[2.0]], "u.weight": [[3.0]], "conv": [[1.0, 10.0]], "o.weight": [[1.0]]}
    mixer = alone(part("short_conv", conv_size=2), weights, embed=1)
    tokens = numbers([[[1.0], [2.0], [3.0]]])
    # 2 · 30, 4 · (120 + 3), 6 · (270 + 12)
    yield Comparison("three tokens", mixer(tokens, ctx(3))[0, :, 0], [60.0, 492.0, 1692.0])
    packed = Ctx(layout=TokenLayout.packed([[1, 2]], 3))
    yield Comparison("a document begins at the second", mixer(tokens, packed)[0, :, 0], [60.0, 480.0, 1692.0])
