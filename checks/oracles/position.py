"""Oracles of positions: sinusoids, rotated pairs, slopes and buckets, computed by hand from the papers' formulas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dovetail.base.errors import StateError
from dovetail.nn.layout import TokenLayout
from dovetail.proof.laws.oracle import Comparison, alone, numbers, oracle, part, row
from dovetail.spec.fold import declared


@oracle("none")
def none() -> Iterator[Comparison]:
    """The identity everywhere."""
    module, layout = alone(part("none"), embed=4), row(2, start=3)
    x = numbers([[[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]]])
    yield Comparison("stream", module.embed(x, layout), [[[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]]], near=0)
    for name in ("rotate", "on_write", "on_read"):
        got = getattr(module, name)(x[..., None, :], layout)
        yield Comparison(name, got, [[[[1.0, 2.0, 3.0, 4.0]], [[5.0, 6.0, 7.0, 8.0]]]], near=0)
    yield Comparison("needs", sorted(part("none").needs()), [])


@oracle("sinusoidal")
def sinusoidal() -> Iterator[Comparison]:
    """Width 4: frequencies 1 and 1/100; sine and cosine lie side by side."""
    module = alone(part("sinusoidal"), embed=4)
    expected = [[[0.0, 1.0, 0.0, 1.0], [0.8414709848, 0.5403023059, 0.0099998333, 0.9999500004]]]
    yield Comparison("positions 0 and 1", module.embed(torch.zeros(1, 2, 4, dtype=torch.float64), row(2)), expected)
    later = module.embed(numbers([[[1.0, 2.0, 3.0, 4.0]]]), row(1, start=3))  # added to what is there
    yield Comparison("position 3", later, [[[1.1411200081, 1.0100075034, 3.0299955002, 4.9995500337]]])
    faster = alone(part("sinusoidal", base=100.0), embed=4)  # frequencies 1 and 1/10
    waves = faster.embed(torch.zeros(1, 1, 4, dtype=torch.float64), row(1, start=1))
    yield Comparison("base 100", waves, [[[0.8414709848, 0.5403023059, 0.0998334166, 0.9950041653]]])
    halves = alone(part("sinusoidal", halves=True), embed=4)
    waves = halves.embed(torch.zeros(1, 1, 4, dtype=torch.float64), row(1, start=1))
    yield Comparison("sines, then cosines", waves, [[[0.8414709848, 0.0099998333, 0.5403023059, 0.9999500004]]])
    last = alone(part("sinusoidal", endpoint=True, base=10.0), embed=4)  # frequencies 1 and 1/10, not 1/√10
    waves = last.embed(torch.zeros(1, 1, 4, dtype=torch.float64), row(1, start=1))
    yield Comparison("the last frequency is 1/base", waves, [[[0.8414709848, 0.5403023059, 0.0998334166, 0.9950041653]]])
    shifted = alone(part("sinusoidal", offset=3), embed=4)
    waves = shifted.embed(numbers([[[1.0, 2.0, 3.0, 4.0]]]), row(1))
    yield Comparison("offset 3", waves, [[[1.1411200081, 1.0100075034, 3.0299955002, 4.9995500337]]])


@oracle("learned")
def learned() -> Iterator[Comparison]:
    """Row p + offset of the table is added to token p; a position past the last row raises."""
    module = alone(part("learned", length=3), {"table": [[10.0, 20.0], [30.0, 40.0], [50.0, 60.0]]}, embed=2)
    x = numbers([[[1.0, 2.0], [3.0, 4.0]]])
    yield Comparison("positions 1 and 2", module.embed(x, row(2, start=1)), [[[31.0, 42.0], [53.0, 64.0]]], near=0)
    restart = module.embed(x, TokenLayout.packed([[1, 1]], 2))
    yield Comparison("each document begins at 0", restart, [[[11.0, 22.0], [13.0, 24.0]]], near=0)
    table = [[1.0, 1.0], [2.0, 2.0], [10.0, 20.0], [30.0, 40.0]]
    shifted = alone(part("learned", length=2, offset=2), {"table": table}, embed=2)
    yield Comparison("offset 2", shifted.embed(x, row(2)), [[[11.0, 22.0], [33.0, 44.0]]], near=0)
    yield Comparison("position 3 of 3 rows", _refusal(module, x, row(2, start=2)), "position 3 … row 2")


def _refusal(module: Any, x: Tensor, layout: TokenLayout) -> str:
    try:
        module.embed(x, layout)
    except StateError as refused:
        message = str(refused)
        return "position 3 … row 2" if "position 3" in message and "last row of the table, 2" in message else message
    return "no refusal"


def _rotated(x: list[float], layout: TokenLayout, site: str = "rotate", **fields: Any) -> Tensor:
    """One token of one head through a rope."""
    module = alone(part("rope", **fields), head=len(x))
    return getattr(module, site)(numbers(x)[None, None, None], layout)[0, 0, 0]


def _token_at(*coords: int) -> TokenLayout:
    """One token at these coordinates of an image or a video."""
    order = torch.tensor([[7]])
    return TokenLayout(torch.tensor([[coords]]), order, torch.zeros_like(order))


ONE_TO_FOUR = [1.0, 2.0, 3.0, 4.0]
ONE_TO_SIX = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
ONE_TO_EIGHT = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]


@oracle("rope")
def rope() -> Iterator[Comparison]:
    """(a, b) -> (a cos θ − b sin θ, b cos θ + a sin θ). Head 4, base 10000: θ = p for pair 0, p/100 for pair 1."""
    # half: pairs (1, 3) and (2, 4); 1·cos 1 − 3·sin 1 = −1.98411065, 2·cos 0.01 − 4·sin 0.01 = 1.95990067, …
    half = [-1.9841106486, 1.9599006675, 2.4623779024, 4.0197996683]
    yield Comparison("half, position 1", _rotated(ONE_TO_FOUR, row(1, start=1)), half)
    yield Comparison("position 0 rotates nothing", _rotated(ONE_TO_FOUR, row(1)), ONE_TO_FOUR)
    # adjacent: pairs (1, 2) and (3, 4); 1·cos 1 − 2·sin 1 = −1.14263966, 2·cos 1 + 1·sin 1 = 1.92207560, …
    adjacent = [-1.1426396637, 1.9220755965, 2.9598506679, 4.0297995017]
    yield Comparison("adjacent, position 1", _rotated(ONE_TO_FOUR, row(1, start=1), pairs="adjacent"), adjacent)
    # half of 8 channels are rotated, the first four; base 100: θ = p and p/10
    first_half = [-3.1440391170, 1.1654558325, -0.3391430828, 4.3176049730, 5.0, 6.0, 7.0, 8.0]
    yield Comparison("fraction ½, position 2", _rotated(ONE_TO_EIGHT, row(1, start=2), fraction=0.5, base=100.0), first_half)
    # two coordinates, (row 1, column 2): the first half of the pairs rotate by the row, the others by the column
    two = [-1.9841106486, -4.4694833804, 2.4623779024, 0.1540075075]
    yield Comparison("2 coordinates", _rotated(ONE_TO_FOUR, _token_at(1, 2), coords=2), two)
    adjacent = [-1.1426396637, 1.9220755965, 2.5856788292, 4.2795169111]  # θ = 1, 0.1, then 2, 0.2
    adjacent += [-7.5365187437, 2.0496061148, 5.2711113985, 9.2312179383]
    got = _rotated(ONE_TO_EIGHT, _token_at(1, 2), coords=2, base=100.0, pairs="adjacent")
    yield Comparison("2 coordinates, adjacent", got, adjacent)
    three = [-2.8255816334, -5.3787808072, -3.8166975382, 3.0026802083, -0.2621393291, -5.5165949554]
    yield Comparison("3 coordinates", _rotated(ONE_TO_SIX, _token_at(1, 2, 3), coords=3), three)
    yield from _mrope()
    text = _rotated(ONE_TO_FOUR, row(1, start=1), coords=2)  # the same position on both coordinates: θ = 1 and 1
    yield Comparison("text with 2 coordinates", text, [-1.9841106486, -2.2852793274, 2.4623779024, 3.8441511931])
    # the score of q = (1, 2, 3, 4) and k = (5, 6, 7, 8), three apart, at any positions
    for q, k in ((2, 5), (100, 103)):
        score = _rotated(ONE_TO_FOUR, row(1, start=q)) @ _rotated([5.0, 6.0, 7.0, 8.0], row(1, start=k), site="on_write")
        yield Comparison(f"score of ({q}, {k})", score, 19.6093206394)
    layout = row(1, start=1)
    yield Comparison("on write", _rotated(ONE_TO_FOUR, layout, site="on_write"), half)
    yield Comparison("on write, not again on read", _rotated(ONE_TO_FOUR, layout, site="on_read"), ONE_TO_FOUR)
    yield Comparison("on read", _rotated(ONE_TO_FOUR, layout, site="on_read", when="read"), half)
    yield Comparison("on read, not on write", _rotated(ONE_TO_FOUR, layout, site="on_write", when="read"), ONE_TO_FOUR)


def _mrope() -> Iterator[Comparison]:
    """Base 64 over 6 pairs: frequencies 1, ½, ¼ … 1/32. A patch at (time 1, height 2, width 3), sections 1, 2, 3: one pair
    turns by 1·1, two by 2·½ and 2·¼, three by 3/8, 3/16, 3/32."""
    x, fields = [float(i) for i in range(1, 13)], {"coords": 3, "base": 64.0}
    # pairs (1, 7), (2, 8) …: 1·cos 1 − 7·sin 1 = −5.34999459, 2·cos 1 − 8·sin 1 = −5.65116327, 3·cos ½ − 9·sin ½ = −1.682, …
    turned = [-5.3499945878, -5.6511632667, -1.6820821618, 0.0593051968, 2.8619303011, 4.8502993439]
    turned += [4.6235871259, 6.0053604166, 9.3365196728, 10.7701663355, 11.7392229279, 12.5089806249]
    yield Comparison("mrope, a patch", _rotated(x, _token_at(1, 2, 3), sections=(1, 2, 3), **fields), turned)
    text = _rotated(x, row(1, start=5), sections=(1, 2, 3), **fields)
    yield Comparison("mrope, text: plain rope", text, _rotated(x, row(1, start=5), base=64.0).tolist(), near=0)
    qwen2_vl = alone(part("rope", coords=3, sections=(16, 24, 24)), head=128).coordinate
    yield Comparison("coordinates of Qwen2-VL's pairs", qwen2_vl[[0, 15, 16, 39, 40, 63]], [0, 0, 1, 1, 2, 2], near=0)


@oracle("alibi")
def alibi() -> Iterator[Comparison]:
    """Press et al.: 8 heads 2^−1 … 2^−8; 12 heads those eight, then every second of the sixteen-head series 2^−½, 2^−1 …"""
    eight = [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625]
    yield Comparison("slopes of 8 heads", alone(part("alibi"), heads=8).slope, eight)
    twelve = [*eight, 0.7071067812, 0.3535533906, 0.1767766953, 0.0883883476]
    yield Comparison("slopes of 12 heads", alone(part("alibi"), heads=12).slope, twelve)
    module = alone(part("alibi"), heads=2)  # 2^−4 and 2^−8
    score = module.score(row(2, start=3), row(5), *module.tables())
    near = [[-0.1875, -0.125, -0.0625, 0.0, -0.0625], [-0.25, -0.1875, -0.125, -0.0625, 0.0]]
    far = [[-0.01171875, -0.0078125, -0.00390625, 0.0, -0.00390625], [-0.015625, -0.01171875, -0.0078125, -0.00390625, 0.0]]
    yield Comparison("scores of positions 3 and 4 against 0 … 4", score, [[near, far]])


DISTANCES = [-200, -20, -5, -1, 0, 1, 7, 8, 9, 15, 16, 17, 20, 31, 32, 64, 127, 128, 1000]
# 32 buckets up to 128, as transformers' T5 puts these distances (query − key) into them
ONE_SIDED = [0, 0, 0, 0, 0, 1, 7, 8, 9, 15, 16, 16, 17, 21, 21, 26, 31, 31, 31]
TWO_SIDED = [31, 26, 21, 17, 0, 1, 7, 8, 8, 9, 10, 10, 10, 11, 12, 14, 15, 15, 15]


@oracle("t5_bias")
def t5_bias() -> Iterator[Comparison]:
    """The bucket of each distance, as in transformers' T5, and the table's bias for it."""
    for bidirectional, expected in ((False, ONE_SIDED), (True, TWO_SIDED)):
        module = alone(part("t5_bias", bidirectional=bidirectional), {"table": [[0.0] * 32]}, heads=1)
        name = "two-sided buckets" if bidirectional else "one-sided buckets"
        yield Comparison(name, module.bucket(torch.tensor(DISTANCES)), expected, near=0)
    small = part("t5_bias", buckets=4, max_distance=8)  # 0, 1, then 2 … 3 and 4 …
    module = alone(small, {"table": [[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]]}, heads=2)
    score = module.score(row(1, start=4), row(5), *module.tables())
    yield Comparison("scores of position 4 against 0 … 4", score, [[[[4.0, 3.0, 3.0, 2.0, 1.0]], [[8.0, 7.0, 7.0, 6.0, 5.0]]]])
    for shared, values in ((True, 4 * 6), (False, 3 * 4 * 6)):
        mixer = part("attention", heads=6, head=4, position=part("t5_bias", buckets=4, max_distance=8, shared=shared))
        spec = part("model", width=24, layers=(part("block", mixer=mixer),) * 3)
        tables = sum(d.size for d in declared(spec) if d.path.endswith("position.table") and d.weight.learned)
        yield Comparison(f"values in the tables of 3 layers, shared {shared}", tables, values, near=0)
