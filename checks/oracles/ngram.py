"""Oracle of n-gram embeddings: multipliers 3 and 5 instead of drawn ones, and a table whose 7 rows hold their number."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from dovetail.nn.cross_layer import Values
from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout
from dovetail.proof.laws.oracle import Comparison, alone, numbers, oracle, part, row
from dovetail.spec.scope import Scope

ROWS = [[[float(r)] for r in range(7)]]


def _module() -> Any:
    weights = {"table": ROWS, "k.weight": [[1.0], [1.0]], "v.weight": [[2.0], [4.0]]}
    module = alone(part("ngram", n=2, hashes=1, rows=7, piece=1), weights, embed=2)
    module.multiplier = torch.tensor([[3, 5]])
    return module


def _run(ids: list[int], layout: TokenLayout, x: Any) -> Any:
    values = Values()
    values.given["inputs"] = torch.tensor([ids])
    return _module()(numbers([x]), Ctx(layout=layout), values=values)[0]


@oracle("ngram")
def ngram() -> Iterator[Comparison]:
    """Ids 4, 0, 6 count as 5, 1, 7: 3·5 = 15, 1 mod 7; 3·1 ⊕ 5·5 = 3 ⊕ 25 = 26, 5 mod 7; 3·7 ⊕ 5·1 = 21 ⊕ 5 = 16, 2 mod 7.

    x = (1, 1) and k ∝ (1, 1) have norm 1 in each channel: s = 2/√2, and σ(√1.41421356) = 0.76659923 of (2, 4)·row."""
    gate = 0.76659923
    want = [[2 * gate * r, 4 * gate * r] for r in (1, 5, 2)]
    yield Comparison("three tokens", _run([4, 0, 6], row(3), [[1.0, 1.0]] * 3), want, near=1e-5)
    # s = 0 for x = (1, −1), where |s| is held at 10⁻⁶: sgn 0 = 0 and σ(0) = ½; s = −√2: σ(−1.18920712) = 0.23340077
    half = _run([4, 0], row(2), [[1.0, -1.0], [-1.0, -1.0]])
    yield Comparison("orthogonal, opposite", half, [[1.0, 2.0], [10 * 0.2334008, 20 * 0.2334008]], near=1e-5)
    two = [[2 * gate * r, 4 * gate * r] for r in (1, 3)]  # 3·1 mod 7
    yield Comparison("a document does not see the one before", _flat([4, 0]), two, near=1e-5)
    many = part("ngram", n=3, hashes=2).constant("multiplier", Scope())
    odd = [[1, 1, 0]] * 2 + [[1, 1, 1]] * 2
    yield Comparison("multipliers are odd, or 0 beyond the n-gram", many.remainder(2), odd, near=0)
    yield Comparison("different multipliers, and 0", len(many.unique()), 11, near=0)


def _flat(ids: list[int]) -> Any:
    """Documents of one token each."""
    values = Values()
    values.given["inputs"] = torch.tensor(ids)
    return _module()(numbers([[1.0, 1.0]] * len(ids)), Ctx(layout=TokenLayout.flat([1] * len(ids))), values=values)
