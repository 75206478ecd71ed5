"""What small models learn, and what they do not: figures, and a plot of each experiment.

    python benchmarks/learn.py [--json] [--only recall lengths] [--out docs/figures/learn] [--draw]

The experiments are those of `trials.py`: recall, lengths, reach and wires. Each writes NAME.json and NAME.png to the directory;
`--draw` trains nothing and plots the stored data. Every seed is fixed; a full run trains some eighty models and
takes an hour or two.
"""

from __future__ import annotations

import argparse
import dataclasses as dc
import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from learn_pictures import PICTURES
from measure import Goal, Row, Spread, arguments, progress, report
from trials import AT_HOME, BEYOND, MIXERS, POSITIONS, QUICK, REACHING, Size, Tick, lengths, reach, recall, wires

from dovetail.base.errors import FileError

NEAR, FAR = 4, 64  # distances at which gradients are compared
LAST = 30  # steps whose mean loss ends a run


@dc.dataclass(frozen=True)
class Trial:
    """One experiment: its function, the number of progress steps, and the rows of its figures."""

    run: Callable[[Size, Tick], dict[str, Any]]
    models: Callable[[Size], int]
    rows: Callable[[dict[str, Any]], list[Row]]


def mean_row(name: str, values: list[float], goal: Goal | None = None) -> Row:
    """The mean over seeds, with half the width of its 95 % interval as the spread."""
    return Row(name, statistics.fmean(values), goal, Spread(interval(values), len(values)))


def interval(values: list[float]) -> float:
    """Half the width of the 95 % interval of a mean, by Student's t."""
    quantile = {1: math.nan, 2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}[len(values)]
    return 0.0 if len(values) < 2 else quantile * statistics.stdev(values) / math.sqrt(len(values))


def recall_rows(data: dict[str, Any]) -> list[Row]:
    """Mean accuracies, and that of the worst seed."""
    goals = {"attention": Goal(low=0.95), "mamba": Goal(low=0.95), "s4": Goal(high=0.6)}
    rows: list[Row] = []
    for task, by_mixer in data["shares"].items():
        for mixer, shares in by_mixer.items():
            worst, which = (max(shares), "highest") if goals[mixer].high is not None else (min(shares), "lowest")
            rows += [mean_row(f"{task}: {mixer}", shares, goals[mixer]), Row(f"{task}: {mixer}, {which} seed", worst)]
    return rows


def length_rows(data: dict[str, Any]) -> list[Row]:
    """Perplexity within and beyond the training length, best first."""
    rows: list[Row] = []
    beyond = {name: [math.exp(statistics.fmean(seed[BEYOND])) for seed in seeds] for name, seeds in data["losses"].items()}
    for rank, name in enumerate(sorted(beyond, key=lambda name: statistics.fmean(beyond[name])), 1):
        home = [math.exp(statistics.fmean(seed[AT_HOME])) for seed in data["losses"][name]]
        rows += [
            mean_row(f"{rank}. {name}: perplexity at {BEYOND.start} to {BEYOND.stop}", beyond[name]),
            mean_row(f"{rank}. {name}: perplexity at {AT_HOME.start} to {AT_HOME.stop}", home),
        ]
    return rows


def reach_rows(data: dict[str, Any]) -> list[Row]:
    """log₁₀ of the gradient norm at 64 tokens ÷ that at 4; attention > LSTM > RNN."""
    rows: list[Row] = []
    for when in ("fresh", "trained"):
        left = {
            name: [math.log10(max(seed[FAR], 1e-300) / seed[NEAR]) for seed in norms[when]]
            for name, norms in data["norms"].items()
        }
        for name, powers in left.items():
            rows.append(mean_row(f"{when} {name}: log10 of the gradient at {FAR} ÷ at {NEAR}", powers))
        for farther, nearer in (("lstm", "rnn"), ("attention", "lstm")):
            gap = statistics.fmean(left[farther]) - statistics.fmean(left[nearer])
            rows.append(Row(f"{when}: {farther} reaches farther than {nearer}, powers of ten", gap, Goal(low=0.0)))
    return rows


def wire_rows(data: dict[str, Any]) -> list[Row]:
    """The final loss of each run, and the gap between post-norm and pre-norm without warm-up."""
    ends = {
        name: [math.inf if run[-1] is None else statistics.fmean(run[-LAST:]) for run in runs]
        for name, runs in data["curves"].items()
    }
    rows = [mean_row(f"{name}: loss at the end", losses) for name, losses in ends.items()]
    gap = statistics.fmean(ends["post, no warm-up"]) - statistics.fmean(ends["pre, no warm-up"])
    rows += [Row("token frequencies only: loss", data["alone"])]
    return [*rows, Row(f"{data['depth']} layers, no warm-up: post − pre, nats", gap, Goal(low=0.5))]


TRIALS = {
    "recall": Trial(recall, lambda size: 2 * len(MIXERS) * size.seeds, recall_rows),
    "lengths": Trial(lengths, lambda size: len(POSITIONS) * size.seeds, length_rows),
    "reach": Trial(reach, lambda size: len(REACHING) * size.few, reach_rows),
    "wires": Trial(wires, lambda size: 4, wire_rows),
}


def asked() -> argparse.Namespace:
    parser = arguments(__doc__ or "")
    parser.set_defaults(threads=1)
    parser.add_argument("--only", nargs="+", choices=TRIALS, default=list(TRIALS), help="some of the experiments")
    parser.add_argument("--out", type=Path, default=Path("learn"), help="the directory of data and plots")
    parser.add_argument("--draw", action="store_true", help="train nothing: plot the stored data")
    return parser.parse_args()


def read(path: Path) -> dict[str, Any]:
    """The data of an earlier run."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FileError(f"{path}: cannot be read ({error}); run without --draw first") from error


def main() -> None:
    args = asked()
    torch.set_num_threads(args.threads)
    size = QUICK if args.quick else Size()
    args.out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for name in args.only:
        path, trial = args.out / f"{name}.json", TRIALS[name]
        if args.draw:
            data = read(path)
        else:
            with progress(name, trial.models(size)) as tick:
                data = trial.run(size, tick)
            path.write_text(json.dumps(data) + "\n", encoding="utf-8")
        PICTURES[name](data, path.with_suffix(".png"))
        rows += trial.rows(data)
    report(rows, args.json)


if __name__ == "__main__":
    main()
