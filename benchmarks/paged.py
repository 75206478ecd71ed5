"""A paged KV cache after churn ÷ a contiguous one: time and memory of a decode step, and how time grows with the tokens held.

Both pools hold the same numbers: 8 rows of 4,096 tokens, pages of 128, after 1,000 random admissions and frees, so that the
pages of a row lie in any order; one row is a fork of another. The two alternate step by step; after each step rows are rolled
back.

    python benchmarks/paged.py [--rounds 7] [--json]
"""

from __future__ import annotations

import dataclasses as dc
import math
import random
from collections.abc import Callable

import bare
import torch
from measure import Goal, Row, agree, arguments, middle, progress, report, seconds, taking_steps
from torch import Tensor

from dovetail import Ctx, Pool
from dovetail.model.construction import build
from dovetail.model.model import ModelModule

CHURN, CHURN_QUICK = 1000, 50


@dc.dataclass(frozen=True)
class Shape(bare.Shape):
    """The model of bare.py, and the sizes of the work."""

    rows: int = 8
    tokens: int = 4096
    page: int = 128
    steps: int = 4


QUICK = Shape(width=24, layers=2, heads=6, kv_heads=2, hidden=44, vocab=62, rows=3, tokens=64, page=8, steps=2)


def churned(shape: Shape, admissions: int) -> Pool:
    """A paged pool whose free pages lie in random order."""
    pool = Pool(shape.spec(), shape.rows + 1, shape.tokens + shape.page, layout="paged", page=shape.page)
    draw, filled = random.Random(0), list[int]()
    for _ in range(admissions):
        row = draw.randrange(shape.rows + 1)
        if row in filled:
            pool.free(row)
            filled.remove(row)
        pool.step([row], [draw.randrange(1, shape.tokens)])
        filled.append(row)
    for row in filled:
        pool.free(row)
    return pool


def filled(pool: Pool, shape: Shape, tokens: int, fork: bool) -> list[int]:
    """Rows of `tokens` tokens each, with the same numbers in every pool; the last is a fork of the first."""
    rows = list(range(shape.rows))
    own = rows[:-1] if fork else rows
    pool.step(own, [tokens] * len(own))
    draw = torch.Generator().manual_seed(1)
    position = torch.arange(tokens)
    for group in pool.groups.values():
        slots = group.slots.slot(torch.tensor(own)[:, None], position)
        for store in group.tensors():
            store[slots] = torch.randn(*slots.shape, *store.shape[1:], generator=draw)
    if fork:
        pool.fork(0, rows[-1])
    return rows


@torch.inference_mode()
def step(model: ModelModule, pool: Pool, rows: list[int], held: int, i: int) -> Tensor:
    """One decode step of all rows, which are then rolled back."""
    taken = pool.step(rows, [1] * len(rows))
    out = model.next_logits(torch.full((len(rows), 1), i % 50), Ctx(layout=taken.layout, views=taken.views))
    for row in rows:
        pool.rollback(row, held)
    return out


def peak(work: Callable[[], object]) -> int:
    """The most bytes of tensors that are alive at once, beyond those before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    now = most = 0
    for event in profile.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


def slope(points: list[tuple[int, float]]) -> float:
    """The slope of log time over log tokens, by least squares."""
    x, y = ([math.log(value) for value in values] for values in zip(*points, strict=True))
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)


def main() -> None:
    """Compare the two pools, and report."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    shape = QUICK if given.quick else Shape()
    model, held = build(shape.spec()), shape.tokens
    paged, plain = churned(shape, CHURN_QUICK if given.quick else CHURN), Pool(shape.spec(), shape.rows, held + shape.page)
    rows = filled(paged, shape, held, fork=True)
    filled(plain, shape, held, fork=True)
    agree("one step", step(model, paged, rows, held, 0), step(model, plain, rows, held, 0), 1e-5)
    fixed = sum(p.nbytes for p in model.parameters()) + plain.bytes()
    more = peak(lambda: step(model, paged, rows, held, 1)) - peak(lambda: step(model, plain, rows, held, 1))
    with progress("paged", given.rounds + 1) as tick:
        ratios = taking_steps(
            lambda i: step(model, plain, rows, held, i),
            lambda i: step(model, paged, rows, held, i),
            shape.steps,
            given.rounds,
            tick,
        )
    time, spread = middle(ratios)
    points: list[tuple[int, float]] = []
    for tokens in (held // 8, held // 4, held // 2, held):
        pool = churned(shape, CHURN_QUICK)
        filled(pool, shape, tokens, fork=False)
        step(model, pool, rows, tokens, 0)
        points.append((tokens, min(seconds(lambda: step(model, pool, rows, tokens, 1)) for _ in range(5))))  # noqa: B023
    report(
        [
            Row("memory beyond the contiguous step, share of all", more / fixed, Goal(high=0.1)),
            Row("time ÷ contiguous", time, Goal(high=1.25), spread),
            Row("slope of log time over log tokens held", slope(points), Goal(high=1.1)),
        ],
        given.json,
    )


if __name__ == "__main__":
    main()
