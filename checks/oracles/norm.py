"""Oracles of norms, of (1, 2, 3, 4): mean 2.5, variance 1.25, mean square 7.5."""

from __future__ import annotations

from collections.abc import Iterator

from torch.nn import Parameter

from checks.oracles.first_rank import halved
from dovetail.proof.laws.oracle import Comparison, alone, ctx, numbers, oracle, part

X = [[1.0, 2.0, 3.0, 4.0]]


@oracle("layernorm")
def layernorm() -> Iterator[Comparison]:
    """(x − 2.5)/√(1.25 + eps) · scale + shift: the variance divides by n, not n − 1."""
    plain = alone(part("layernorm", shift=False), {"scale": [1.0] * 4}, embed=4)
    yield Comparison("scale 1", plain(numbers(X), ctx(1)), [[-1.34163542, -0.44721181, 0.44721181, 1.34163542]])
    weights = {"scale": [1.0, 2.0, 3.0, 4.0], "shift": [0.1, 0.2, 0.3, 0.4]}
    wide = alone(part("layernorm", eps=0.1), weights, embed=4)  # √1.35 = 1.16189500
    yield Comparison("eps 0.1", wide(numbers(X), ctx(1)), [[-1.19099445, -0.66066297, 1.59099445, 5.56397779]])
    offset = {"scale": [0.0, 1.0, 2.0, 3.0], "shift": [0.1, 0.2, 0.3, 0.4]}  # the weights stand for 1, 2, 3, 4
    above = alone(part("layernorm", eps=0.1, plus_one=True), offset, embed=4)
    yield Comparison("plus one", above(numbers(X), ctx(1)), [[-1.19099445, -0.66066297, 1.59099445, 5.56397779]])
    whole = alone(part("layernorm", eps=0.1), weights, embed=4)
    whole.scale, whole.shift = Parameter(whole.scale[:2]), Parameter(whole.shift[:2])  # 3 and 4 are on the other rank
    got = whole(numbers(X)[:, :2], halved(7.0, 2.5))  # 3 + 4, and 0.5² + 1.5² around the mean
    yield Comparison("sharded across two ranks", got, [[-1.19099445, -0.66066297]])


@oracle("rmsnorm")
def rms() -> Iterator[Comparison]:
    """x/√(7.5 + eps) · scale."""
    plain = alone(part("rmsnorm"), {"scale": [1.0] * 4}, embed=4)
    yield Comparison("scale 1", plain(numbers(X), ctx(1)), [[0.36514813, 0.73029626, 1.09544438, 1.46059251]])
    yield Comparison("of zeros", plain(numbers([[0.0] * 4]), ctx(1)), [[0.0, 0.0, 0.0, 0.0]])
    wide = alone(part("rmsnorm", eps=0.1), {"scale": [1.0, 2.0, 3.0, 4.0]}, embed=4)  # √7.6 = 2.75680975
    yield Comparison("eps 0.1", wide(numbers(X), ctx(1)), [[0.36273813, 1.45095250, 3.26464313, 5.80381000]])
    gemma = alone(part("rmsnorm", plus_one=True), {"scale": [1.0, 2.0, 3.0, 4.0]}, embed=4)  # factors of 2, 3, 4, 5
    yield Comparison("plus one", gemma(numbers(X), ctx(1)), [[0.73029626, 2.19088877, 4.38177754, 7.30296256]])
    # (1, 2) over √(2.5 + 0.1), (3, 4) over √(12.5 + 0.1), each by its own scale
    grouped = alone(part("rmsnorm", eps=0.1, groups=2), {"scale": [1.0, 2.0, 3.0, 4.0]}, embed=4)
    want = [[0.62017367, 2.48069469, 2.53546276, 4.50748936]]
    yield Comparison("two groups", grouped(numbers(X), ctx(1)), want)
    above = alone(part("rmsnorm", eps=0.1, groups=2, plus_one=True), {"scale": [0.0, 1.0, 2.0, 3.0]}, embed=4)
    yield Comparison("two groups, plus one", above(numbers(X), ctx(1)), want)
    cut = alone(part("rmsnorm", eps=0.1, groups=3), {"scale": [1.0] * 6}, embed=6)  # 4² of the second group is elsewhere
    cut.scale, cut.group_number = Parameter(cut.scale[:3]), cut.group_number[:3]
    got = cut(numbers([[1.0, 2.0, 3.0]]), halved([0.0, 16.0, 61.0]))
    yield Comparison("a group on two ranks", got, [[0.62017367, 1.24034735, 0.84515425]])
    free = alone(part("rmsnorm", eps=0.1, scale=False), {}, embed=4)
    yield Comparison("without scale", free(numbers(X), ctx(1)), [[0.36273813, 0.72547625, 1.08821438, 1.45095250]])
    shared = free(numbers(X)[:, :2], halved(25.0))
    yield Comparison("without scale, sharded across two ranks", shared, [[0.36273813, 0.72547625]])
    half = alone(part("rmsnorm", eps=0.1), {"scale": [1.0, 2.0, 3.0, 4.0]}, embed=4)
    half.scale = Parameter(half.scale[:2])
    yield Comparison(
        "sharded across two ranks", half(numbers(X)[:, :2], halved(25.0)), [[0.36273813, 1.45095250]]
    )  # 3² + 4² on the other rank
