"""How often a lab is wrong, and how many seeds it needs: A/A labs whose noise is that of real runs.

pool        30 seeds of a base and of three arms: 120 real runs of a small model by `dovetail lab`, which resumes
fitted      labs whose losses are normal with the covariance of the pool, without a difference
resampled   labs whose seeds are drawn with replacement from the pool, each arm moved so that its mean is the base's
looked at   after every seed from the 14th to the 30th, as a lab does

A lab of three arms is wrong if it calls any arm better or worse. Beside it, on the same labs and at one level for all arms:
a paired t test that is looked at after every seed, the same once at 30 seeds, and an unpaired t test at 7 seeds.
Power: arms that differ by 4 standard errors of the paired difference at 10 seeds, called within 20 seeds.

    python benchmarks/lab.py --json [--pool DIR] [--table FILE.json] [--losses FILE.json]
"""

from __future__ import annotations

import json
import math
import pydoc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from measure import Goal, Row, arguments, progress, report
from scipy import stats

import dovetail as dt
from dovetail.experiments.design import LabDesign
from dovetail.experiments.verdict import judge, pairing

SEEDS, FIRST, MOST, WITHIN = 30, LabDesign.at_least, 30, 20
EARLY = 5  # a look that is too early for skewed differences
LABS = 2000
LEVEL = 0.05
EFFECT, AT = 4, 10  # standard errors, at this number of seeds
UNPAIRED = 7  # seeds
Array = np.ndarray[Any, np.dtype[np.float64]]
Draw = Callable[[], Array]  # (1 + arms, seeds) losses of a lab, the base first
DESIGN: dict[str, Any] = {
    "base": "{width: 32, vocab: 260, layers: [{repeat: 2, mixer: {heads: 4, kv_heads: 4, head: 8}, ffn: {hidden: 88}}]}\n",
    "arms": {
        "gqa": {"set": {"layers.*.mixer.kv_heads": 2}},
        "alibi": {"swap": {"position": "alibi"}},
        "gelu": {"swap": {"act": "gelu"}},
    },
    "train": {"batch": 8, "length": 64, "evals": 1, "learning_rate": 0.01},
    "budget": {"tokens": "20k"},
    "seeds": {"at_least": SEEDS, "at_most": SEEDS},
}


def pooled(place: Path, quick: bool) -> dict[str, list[float]]:
    """The losses of the pool by arm, in the order of the seeds."""
    place.mkdir(parents=True, exist_ok=True)
    text = place / "text.txt"
    if not text.exists():
        text.write_text(pydoc.plain(pydoc.render_doc("builtins")), encoding="utf-8")
    seeds = FIRST if quick else SEEDS
    budget = {"budget": {"steps": 4}} if quick else {}
    design = {**DESIGN, **budget, "data": {"text": str(text)}, "seeds": {"at_least": seeds, "at_most": seeds}}

    def tell(*step: Any) -> None:
        print(f"  {step[0]} of {step[1]} runs, {step[2]}", file=sys.stderr, flush=True)

    result = dt.lab(design, out=place / "lab", progress=tell)
    frame = result.frame()
    rows = sorted(zip(frame["arm"], frame["seed"], frame["value"], strict=True), key=lambda row: row[1])
    return {name: [value for arm, _, value in rows if arm == name] for name in ("base", *DESIGN["arms"])}


def fitted(pool: Array, draw: np.random.Generator) -> Draw:
    """Labs of normal losses with the covariance of the pool."""
    root = np.linalg.cholesky(np.cov(pool) + 1e-12 * np.eye(len(pool)))
    return lambda: root @ draw.standard_normal((len(pool), MOST))


def resampled(pool: Array, draw: np.random.Generator) -> Draw:
    """Labs of seeds of the pool, without the difference of their means."""
    centered = pool - pool.mean(1, keepdims=True)
    return lambda: centered[:, draw.integers(pool.shape[1], size=MOST)]


def calls(losses: Array, most: int, first: int = FIRST) -> Iterator[str]:
    """The verdict on each arm of a lab that is looked at from a number of seeds on."""
    base = losses[0, :most].tolist()
    for arm in losses[1:, :most].tolist():
        yield judge(arm, base, at_least=first, alpha=LEVEL, comparisons=len(losses) - 1).kind


def t_limits(comparisons: int) -> Array:
    """|t| beyond which a two-sided t test rejects, after n differences; all arms share the level."""
    return np.array([math.inf, math.inf, *stats.t.ppf(1 - LEVEL / comparisons / 2, np.arange(1, MOST))])


def paired_t(losses: Array) -> Array:
    """(arms, seeds) |t| of the paired differences of the first n seeds."""
    d, n = losses[1:] - losses[0], np.arange(1, MOST + 1)
    mean = d.cumsum(1) / n
    spread = np.maximum((d**2).cumsum(1) - n * mean**2, 1e-300)
    return np.abs(mean) / np.sqrt(spread / np.maximum(n - 1, 1) / n)


def unpaired_t(losses: Array) -> bool:
    """Whether an unpaired t test at 7 seeds of its own per arm rejects for any arm."""
    seeds = [losses[i, i * UNPAIRED : (i + 1) * UNPAIRED] for i in range(len(losses))]  # no seed is of two arms
    limit = LEVEL / (len(losses) - 1)
    return any(float(stats.ttest_ind(arm, seeds[0]).pvalue) < limit for arm in seeds[1:])


def rows_of(name: str, lab: Draw, labs: int, differences: Array) -> list[Row]:
    """The figures of one kind of noise. `differences`: the standard deviation of each arm's paired difference."""
    wrong = {"lab": 0, "early": 0, "peeking": 0, "once": 0, "unpaired": 0}
    limits, found, seeds = t_limits(len(differences)), 0, list[int]()
    with progress(name, labs) as advance:
        for _ in range(labs):
            losses = lab()
            wrong["lab"] += any(kind in ("better", "worse") for kind in calls(losses, MOST))
            wrong["early"] += any(kind in ("better", "worse") for kind in calls(losses, MOST, EARLY))
            t = paired_t(losses)
            beyond = t > limits[1:]
            wrong["peeking"] += bool(beyond[:, FIRST - 1 :].any())
            wrong["once"] += bool(beyond[:, -1].any())
            wrong["unpaired"] += unpaired_t(losses)
            shifted = lab()
            shifted[1:] += (EFFECT / math.sqrt(AT) * differences)[:, None]
            for i in range(1, len(shifted)):
                at = judge(
                    shifted[i, :WITHIN].tolist(),
                    shifted[0, :WITHIN].tolist(),
                    at_least=FIRST,
                    alpha=LEVEL,
                    comparisons=len(differences),
                )
                found += at.kind == "worse"
                seeds += [at.interval.n] * (at.kind == "worse")
            advance()
    return [
        Row(f"{name}: A/A labs that call an arm different", wrong["lab"] / labs, Goal(high=LEVEL)),
        Row(f"{name}: … looked at from the {EARLY}th seed on", wrong["early"] / labs),
        Row(f"{name}: … by a paired t test looked at after every seed", wrong["peeking"] / labs),
        Row(f"{name}: … by a paired t test at {MOST} seeds, once", wrong["once"] / labs),
        Row(f"{name}: … by an unpaired t test at {UNPAIRED} seeds", wrong["unpaired"] / labs),
        Row(
            f"{name}: differences of {EFFECT} standard errors that are called within {WITHIN} seeds",
            found / labs / len(differences),
            Goal(low=0.9),
        ),
        Row(f"{name}: … median number of seeds", float(np.median(seeds or [math.nan]))),
    ]


def main() -> None:
    """Train the pool, simulate and report."""
    parser = arguments(__doc__ or "")
    parser.add_argument(
        "--pool", type=Path, default=Path(".full/lab-pool"), help="directory of the pool; a complete one trains nothing"
    )
    parser.add_argument("--table", type=Path, help="also write the losses of the pool as JSON")
    parser.add_argument("--losses", type=Path, help="a pool that --table wrote: nothing is trained")
    args = parser.parse_args()
    losses = pooled(args.pool, args.quick) if args.losses is None else json.loads(args.losses.read_text(encoding="utf-8"))
    if args.table is not None:
        args.table.write_text(json.dumps(losses, indent=1) + "\n", encoding="utf-8")
    pool, labs = np.array(list(losses.values())), 50 if args.quick else LABS
    differences = (pool[1:] - pool[0]).std(1, ddof=1)
    rows = [Row("runs of the pool", pool.size, None if args.quick else Goal(low=120))]
    for name, arm in zip(DESIGN["arms"], pool[1:], strict=True):
        correlation, saved = pairing(arm.tolist(), pool[0].tolist())
        rows += [Row(f"{name}: variance that pairing saves", saved), Row(f"{name}: correlation of the losses", correlation)]
    draw = np.random.default_rng(0)
    for name, kind in (("fitted", fitted), ("resampled", resampled)):
        rows += rows_of(name, kind(pool, draw), labs, differences)
    report(rows, args.json)


if __name__ == "__main__":
    main()
