"""Tiled attention: its workspace, and whether its time is proportional to the tiles that a mask touches.

Workspace is the peak of allocated bytes, forward and backward, beyond q, k, v, z, lse and the gradients. It must not grow with
n; with a window the time must be linear in n. For every kind of mask the time is compared with a·tiles + b·rows of tiles, where
a and b are fitted to `causal` and to `full` over different numbers of keys. Finally, the kernel that `attend` chooses must be
the faster one. Every output is first compared with the reference kernel. A timed step has 8 layers: plan and masks are computed
once per step for all of its layers, as in a model. A time is the minimum of all rounds, since other load only adds to it; the
spread is the difference between two halves of the rounds.

    python benchmarks/attend.py [--rounds 7] [--json]
"""

from __future__ import annotations

import dataclasses as dc
import statistics
from collections.abc import Callable, Sequence
from math import log
from typing import Any

import numpy as np
import torch
from measure import Goal, Row, Spread, agree, arguments, middle, progress, report, seconds
from memory import Alive
from torch import Tensor

from dovetail import (
    TokenLayout,
    parts as _registered,  # noqa: F401
)
from dovetail.nn.groups import Mask
from dovetail.nn.view import Scoring
from dovetail.ops import attend_tiled
from dovetail.ops.attend import attend, chosen, using
from dovetail.spec.part import from_data

LAYERS = 8
WINDOW = ["causal", {"kind": "window", "size": 256}]
MASKS: dict[str, Any] = {
    "causal": "causal",
    "window with keep": {"kind": "window", "size": 256, "keep": 4},
    "prefix": {"kind": "prefix", "length": 300},
    "global_tokens": {"kind": "global_tokens", "tokens": 100},
    "block_local": {"kind": "block_local", "size": 96, "back": 1},
    "strided": {"kind": "strided", "step": 32},
    "dilated": {"kind": "dilated", "size": 64, "step": 2},
    "random_blocks": {"kind": "random_blocks", "size": 64, "count": 2},
    "by_head": {"kind": "by_head", "masks": ["causal", {"kind": "window", "size": 256}]},
    "all_of": WINDOW,
    "any_of": {"any": [{"kind": "window", "size": 128}, {"kind": "global_tokens", "tokens": 8}, {"kind": "random_blocks"}]},
    "full": "full",
}


@dc.dataclass(frozen=True)
class Shape:
    """One sequence of tokens with its heads."""

    heads: int
    kv_heads: int
    head: int


@dc.dataclass
class Case:
    """One attention, forward and backward: n queries over m keys."""

    mask: Mask
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor

    @staticmethod
    def of(mask: Any, shape: Shape, n: int, m: int | None = None) -> Case:
        torch.manual_seed(0)
        keys = (1, m or n, shape.kv_heads, shape.head)
        q, g = (torch.randn(1, n, shape.heads, shape.head) for _ in range(2))
        k, v = torch.randn(keys), torch.randn(keys)
        return Case(from_data(mask, Mask), *(t.requires_grad_() for t in (q, k, v)), g)  # type: ignore[type-abstract]

    def scoring(self) -> Scoring:
        return Scoring(mask=self.mask, scale=self.q.shape[-1] ** -0.5, heads=torch.arange(self.q.shape[-2]))

    def layouts(self) -> tuple[TokenLayout, TokenLayout]:
        """New layouts of queries and keys, with empty caches."""
        layout = TokenLayout.whole(1, self.q.shape[1])
        return layout, layout if self.q.shape[1] == self.k.shape[1] else TokenLayout.whole(1, self.k.shape[1])

    def run(self, kernel: str, layouts: tuple[TokenLayout, TokenLayout] | None = None) -> tuple[Tensor, ...]:
        """One layer: the output and the gradients of q, k and v."""
        with using(kernel):
            z = attend(self.q, self.k, self.v, self.scoring(), *(layouts or self.layouts()))
        return z, *torch.autograd.grad(z, (self.q, self.k, self.v), self.g)

    def seconds(self, kernel: str = "tiled") -> float:
        """The time of one step."""

        def step() -> None:
            layouts = self.layouts()
            for _ in range(LAYERS):
                self.run(kernel, layouts)

        return seconds(step)

    def tiles(self) -> float:
        """The number of tiles of scores that the mask touches."""
        return attend_tiled.touched(self.scoring(), *self.layouts()) / attend_tiled.TILE**2

    def chosen(self) -> str:
        """The kernel that `attend` chooses."""
        scoring = self.scoring()
        return chosen(self.q, scoring, *self.layouts(), scoring.needs)[0].name


def slope(sizes: Sequence[int], values: Sequence[float]) -> float:
    """The slope of log value over log size: 1 for linear growth, 0 for none."""
    return statistics.linear_regression([log(n) for n in sizes], [log(value) for value in values]).slope


# -- the figures -----------------------------------------------------------------------------------------------------


def workspace(mask: Any, shape: Shape, n: int) -> int:
    """The peak of allocated bytes beyond q, k, v, z, lse and the gradients."""
    case = Case.of(mask, shape, n)
    layout, _ = case.layouts()
    with using("tiled"), Alive(case.q, case.k, case.v, case.g, layout.order) as alive:
        z = attend(case.q, case.k, case.v, case.scoring(), layout, layout)
        grads = torch.autograd.grad(z, (case.q, case.k, case.v), case.g)
    lse = n * shape.heads * z.element_size()
    return alive.peak - z.nbytes - lse - sum(grad.nbytes for grad in grads)


def memory_rows(sizes: Sequence[int]) -> list[Row]:
    shape, rows = Shape(heads=2, kv_heads=1, head=16), []
    with progress("workspace", 2 * len(sizes)) as tick:
        for name, mask in (("causal", "causal"), ("window 256", WINDOW)):
            used: list[float] = []
            for n in sizes:
                used.append(workspace(mask, shape, n))
                tick()
            rows.append(Row(f"workspace, slope in n = {sizes[0]} … {sizes[-1]}: {name}", slope(sizes, used), Goal(high=0.1)))
            rows.append(Row(f"workspace, MB at n = {sizes[-1]}: {name}", used[-1] / 1e6))
    return rows


def window_row(sizes: Sequence[int], shape: Shape, rounds: int) -> Row:
    cases = [Case.of(WINDOW, shape, n) for n in sizes]
    slopes: list[float] = []
    with progress("window 256, time", rounds + 1) as tick:
        for _ in range(rounds + 1):
            slopes.append(slope(sizes, [case.seconds() for case in cases]))
            tick()
    value, spread = middle(slopes[1:])
    return Row(f"time, slope in n = {sizes[0]} … {sizes[-1]}: window 256", value, Goal(high=1.15), spread)


def mask_rows(n: int, shape: Shape, rounds: int) -> list[Row]:
    """Time of each mask ÷ the time that its tiles predict."""
    known = [Case.of("causal", shape, n), *(Case.of("full", shape, n, n // cut) for cut in (1, 4, 16, 32))]
    tiles = np.array([[case.tiles(), 1.0] for case in known])
    asked = {name: Case.of(mask, shape, n) for name, mask in MASKS.items()}
    touched = {name: case.tiles() for name, case in asked.items()}
    taken: list[list[float]] = []  # (rounds, cases): seconds
    with progress(f"masks, n = {n}", rounds + 1) as tick:
        for _ in range(rounds + 1):
            taken.append([case.seconds() for case in (*known, *asked.values())])
            tick()

    def ratios(some: np.ndarray) -> np.ndarray:
        """(masks,) the minimum time in these rounds ÷ the predicted time."""
        least = some.min(0)
        (each, rest), *_ = np.linalg.lstsq(tiles / least[: len(known), None], np.ones(len(known)), rcond=None)
        return least[len(known) :] / (each * np.array(list(touched.values())) + rest)

    times = np.array(taken[1:])
    spread = np.abs(ratios(times[::2]) - ratios(times[1::2])) if rounds > 1 else np.zeros(len(asked))
    return [
        Row(
            f"time ÷ a·tiles + b·rows, n = {n}: {name} ({count:.0f} tiles)",
            value,
            Goal(low=0.8, high=1.2),
            Spread(apart, rounds),
        )
        for (name, count), value, apart in zip(touched.items(), map(float, ratios(times)), map(float, spread), strict=True)
    ]


def choice_rows(cases: dict[str, Case], rounds: int) -> list[Row]:
    """The times of both kernels, and whether the chosen one is the faster."""
    rows: list[Row] = []
    with progress("tiled and torch", len(cases) * (rounds + 1)) as tick:
        for name, case in cases.items():
            ratios: list[float] = []
            for _ in range(rounds + 1):
                ratios.append(case.seconds("torch") / case.seconds())
                tick()
            value, spread = middle(ratios[1:])
            rows.append(Row(f"time torch ÷ tiled, {name}", value, None, spread))
            lost = max(1.0, value) if case.chosen() == "torch" else max(1.0, 1 / value)
            rows.append(Row(f"time chosen ({case.chosen()}) ÷ cheapest, {name}", lost, Goal(high=1.1), spread / value))
    return rows


def gate(cases: dict[str, Case], kernels: Sequence[str]) -> None:
    """Check that outputs and gradients of every kernel equal those of the reference."""
    with progress("outputs compared", len(cases)) as tick:
        for name, case in cases.items():
            want = case.run("reference")
            for kernel in kernels:
                for ours, theirs in zip(case.run(kernel), want, strict=True):
                    agree(f"{kernel}, {name}", ours, theirs, 1e-4)
            tick()


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each figure")
    flags = parser.parse_args()
    torch.set_num_threads(flags.threads)
    shape = Shape(heads=6, kv_heads=2, head=12) if flags.quick else Shape(heads=8, kv_heads=2, head=64)
    sizes = (256, 512, 1024) if flags.quick else (1024, 2048, 4096, 8192, 16384)
    n = 512 if flags.quick else 2048

    gate({name: Case.of(mask, shape, 300) for name, mask in MASKS.items()}, ("tiled", "torch"))
    figures: list[Callable[[], list[Row]]] = [
        lambda: memory_rows(sizes),
        lambda: [window_row(sizes, shape, flags.rounds)],
        lambda: mask_rows(n, shape, flags.rounds),
        lambda: choice_rows(
            {
                f"causal, n = {2 * n}": Case.of("causal", shape, 2 * n),
                f"window 256, n = {n // 4}": Case.of(WINDOW, shape, n // 4),
                f"window 256, n = {2 * n}": Case.of(WINDOW, shape, 2 * n),
                f"strided 64, n = {2 * n}": Case.of(["causal", {"kind": "strided", "step": 64}], shape, 2 * n),
            },
            flags.rounds,
        ),
    ]
    report([row for figure in figures for row in figure()], flags.json)


if __name__ == "__main__":
    main()
