"""Oracles of streaming positions, computed by hand. With one pair of channels the angle is the position itself.

A window of 3 with keep 1 has a cache of 4: token 0 has position 0, the window positions 1, 2, 3, and the query position 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dovetail.proof.laws.oracle import Comparison, alone, oracle, part, row
from dovetail.spec.scope import Scope

COS_1, COS_2, COS_3 = 0.5403023059, -0.4161468365, -0.9899924966


def _module(of: Any, keep: int = 1, head: int = 2, heads: int = 1) -> Any:
    return alone(part("streaming", of=of), kept=keep, cache=keep + 3, coords=1, head=head, heads=heads)


def _rotated(module: Any, site: str, at: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """(1, 0) as a query or key at this position."""
    return getattr(module, site)(torch.tensor([[[[1.0, 0.0]]]], dtype=dtype), row(1, start=at))[0, 0, 0]


@oracle("streaming")
def streaming() -> Iterator[Comparison]:
    """q = k = (1, 0): a score is the cosine of the distance."""
    module = _module(part("rope", when="read"))
    query = [-0.8390715291, -0.5440211109, COS_3, 0.1411200081]  # cos 10, sin 10 in the sequence; cos 3, sin 3 in the cache
    yield Comparison("a query at 10", _rotated(module, "rotate", 10), query)
    yield Comparison("the first key", _rotated(module, "on_read", 0), [0.0, 0.0, 1.0, 0.0])
    yield Comparison("a key at 9", _rotated(module, "on_read", 9), [-0.9111302619, 0.4121184852, 0.0, 0.0])
    learned = module.placeless(torch.tensor([[[1.0, 0.0]]], dtype=torch.float64))[0, 0]
    yield Comparison("a learned key", learned, [0.0, 0.0, 1.0, 0.0])
    yield Comparison("score of 10 and a learned key", _rotated(module, "rotate", 10) @ learned, COS_3)
    yield Comparison("keys are cached without rotation", _rotated(module, "on_write", 9), [1.0, 0.0])
    for t, j, expected in ((2, 0, COS_2), (3, 0, COS_3), (4, 0, COS_3), (10, 0, COS_3), (10, 9, COS_1), (4, 2, COS_2)):
        score = _rotated(module, "rotate", t) @ _rotated(module, "on_read", j)
        yield Comparison(f"score of {t} and {j}", score, expected)
    far = 1_000_000_000
    late = _rotated(module, "rotate", far, torch.float32) @ _rotated(module, "on_read", far - 1, torch.float32)
    yield Comparison("score of 10⁹ and the one before, in float32", late, COS_1, near=1e-6)
    none_kept = _module(part("rope", when="write"), keep=0)
    yield Comparison("keep 0, a query at 10", _rotated(none_kept, "rotate", 10), query[:2])
    yield Comparison("rotated when written", _rotated(none_kept, "on_write", 9), [-0.9111302619, 0.4121184852])
    slopes = _module(part("alibi"), heads=2)  # 2^−4 and 2^−8
    score = slopes.score(row(1, start=10), row(11), *slopes.tables())[..., [0, 8, 9, 10]]
    near = [[-0.1875, -0.125, -0.0625, 0.0]]
    yield Comparison("ALiBi of 10 and 0, 8, 9, 10", score, [[near, [[-0.01171875, -0.0078125, -0.00390625, 0.0]]]])
    for keep, products in (
        (1, 7000),
        (0, 0),
    ):  # 5 heads of 7 channels, 10 tokens: 2·35·100 more where queries are rotated twice
        scope = _module(part("rope"), keep, head=8).scope.add(heads=5, head=7)
        yield Comparison(f"additional FLOPs with keep {keep}", part("streaming").cost(scope, 10)[0], products, near=0)
    scope = _module(part("rope"), 1, head=8).scope.add(heads=5, head=7, prefix=3)  # and 2·35·10·3 with 3 learned keys
    yield Comparison("additional FLOPs with a prefix", part("streaming").cost(scope, 10), [9100, 4480], near=0)
    near = part("all_of", masks=(part("causal"), part("window", size=3, keep=1)))
    mixer = part("attention", heads=1, head=2, mask=near)
    inside = mixer.position_scope(mixer.axes(Scope(sizes={"embed": 2})))
    yield Comparison("slots and kept tokens of the cache", [inside.size("cache"), inside.size("kept")], [4, 1], near=0)
    # pairs that the mask leaves: 1 + 2 + 3 + 4, then 6 times 4, each 70
    scope = _module(part("rope"), head=8).scope.add(heads=5, head=7)
    yield Comparison("additional FLOPs of the pairs that the mask leaves", part("streaming").cost(scope, 10)[1], 2380, near=0)
