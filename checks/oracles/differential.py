"""Oracles of differential_attention: two tokens by hand."""

from __future__ import annotations

from collections.abc import Iterator
from math import log

from dovetail.proof.laws.oracle import Comparison, alone, ctx, numbers, oracle, part


@oracle("differential_attention")
def difference() -> Iterator[Comparison]:
    """One head of two halves of size 1, in the first layer: λ₀ = 0.2, and λ = e^{ln 2} − e⁰ + 0.2 = 1.2.

    The second token (0, 1) attends by (3/4, 1/4) and by (1/5, 4/5) to the values (1, 0) and (0, 1), so that z is
    (0.75 − 0.24, 0.25 − 0.96) = (0.51, −0.71), with a root mean square of 0.61814…; out is 0.8 z over it."""
    eye = [[1.0, 0.0], [0.0, 1.0]]
    scores = {"q.weight": [[0.0, 1.0], [0.0, 1.0]], "k.weight": [[log(3.0), 0.0], [0.0, log(4.0)]]}
    factor = {"a1": [log(2.0)], "b1": [1.0], "a2": [0.0], "b2": [1.0]}
    spec = part("differential_attention", heads=1, head=1, position=part("none"), eps=1e-30)
    mixer = alone(spec, {**scores, **factor, "v.weight": eye, "o.weight": eye}, embed=2)
    out = mixer(numbers([[[1.0, 0.0], [0.0, 1.0]]]), ctx(2))[0]
    yield Comparison("the first token sees itself: (1 − λ) · v", out[0], [-1.1313708498984762, 0.0])
    yield Comparison("the second token", out[1], [0.6600421104312423, -0.9188821537376117])
