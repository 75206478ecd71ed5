"""Measurement and report of a benchmark: rows with a goal, paired timing, a table or JSON.

A benchmark is `python benchmarks/NAME.py [--json]`. One process runs both sides. Their outputs are compared before they are
timed. A and B alternate, and the one that runs first changes from round to round. Only ratios are reported: on a shared machine
a single time means little. `holds` is true where the whole interval of a figure (its median ± one interquartile range) is
within the goal, false where the whole interval is outside, and null otherwise, or where there are fewer than five rounds.
"""

from __future__ import annotations

import argparse
import dataclasses as dc
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import dovetail

ROUNDS = 5  # the fewest that give an interval


@dc.dataclass(frozen=True)
class Goal:
    """The values that are good enough: low ≤ value ≤ high."""

    low: float | None = None
    high: float | None = None

    def met(self, low: float, high: float) -> bool | None:
        """Whether all values between low and high are within the goal; None where only some are."""
        if (self.low is None or low >= self.low) and (self.high is None or high <= self.high):
            return True
        outside = (self.low is not None and high < self.low) or (self.high is not None and low > self.high)
        return False if outside else None

    @classmethod
    def read(cls, text: str) -> Goal:
        """The goal that is written so."""
        first, *rest = text.split(" ")
        if first in ("≥", "≤"):
            return cls(low=float(rest[0])) if first == "≥" else cls(high=float(rest[0]))
        return cls(float(first), float(rest[1]))

    def __post_init__(self) -> None:
        if self.low is None and self.high is None:
            raise ValueError("a goal needs a limit; a row without a goal has None")

    def __str__(self) -> str:
        if self.low is not None and self.high is not None:
            return f"{self.low:g} … {self.high:g}"
        return f"≥ {self.low:g}" if self.low is not None else f"≤ {self.high:g}"


@dc.dataclass(frozen=True)
class Spread:
    """Half the width of the interval of a figure, and the number of rounds behind it. `middle` takes one interquartile range:
    for five rounds the median ± that contains the true median about 19 times in 20, for more rounds more often."""

    width: float
    rounds: int

    def __truediv__(self, by: float) -> Spread:
        return Spread(self.width / by, self.rounds)


@dc.dataclass(frozen=True)
class Row:
    """One figure. Without a spread it is exact: a count, a number of bytes, a single time with a generous limit."""

    name: str
    value: float
    goal: Goal | None = None
    spread: Spread | None = None

    @property
    def holds(self) -> bool | None:
        """Whether the goal is met; None where there is no goal, too few rounds, or an interval across the limit."""
        if self.goal is None or (self.spread is not None and self.spread.rounds < ROUNDS):
            return None
        width = 0.0 if self.spread is None else self.spread.width
        return self.goal.met(self.value - width, self.value + width)

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> Row:
        """The row of plain data. Older rows with a spread have no number of rounds: it was at least five."""
        goal = None if data["goal"] is None else Goal.read(data["goal"])
        spread = data.get("spread")
        return cls(data["name"], data["value"], goal, None if spread is None else Spread(spread, data.get("rounds") or ROUNDS))

    def data(self) -> dict[str, object]:
        """The row as plain data, for JSON."""
        row = {"name": self.name, "value": float(f"{self.value:.5g}"), "goal": None if self.goal is None else str(self.goal)}
        row |= {"holds": self.holds, "spread": None if self.spread is None else round(self.spread.width, 4)}
        return row | {"rounds": None if self.spread is None else self.spread.rounds}


def verdict(row: Mapping[str, Any]) -> str:
    """What a reader is shown of a row as plain data: yes, no, or why neither."""
    if row["goal"] is None:
        return "no goal"
    if row["holds"] is not None:
        return "yes" if row["holds"] else "NO"
    rounds = row.get("rounds")
    return "too noisy" if rounds is None or rounds >= ROUNDS else f"too few rounds ({rounds})"


Work = Callable[..., list[Row]]  # (an empty folder, sizes by name) -> the figures of a fault


def run_row(name: str, work: Work, sizes: Mapping[str, Any], *, quick: bool) -> list[Row]:
    """The figures of a fault, with small `sizes` where `quick`, and its seconds. One that could not be run does not hold."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        try:
            rows = work(Path(place).resolve(), **(sizes if quick else {}))
        except (SystemExit, Exception) as error:  # e.g. a system that allows no mount
            rows = [Row(f"{name} could not be run: {(str(error).splitlines() or [repr(error)])[0][:200]}", 0, Goal(low=1))]
    took = time.monotonic() - begin
    failed = [f"{row.name}: {row.value:g}" for row in rows if row.holds is False]
    print(f"{name}: {'; '.join(failed) or 'holds'}, {took:.0f} s", file=sys.stderr, flush=True)
    return [*rows, Row(f"{name} seconds", took)]


def middle(values: Sequence[float]) -> tuple[float, Spread]:
    """The median, and the interquartile range (0 for a single value)."""
    if len(values) < 2:
        return values[0], Spread(0.0, len(values))
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return statistics.median(values), Spread(high - low, len(values))


def seconds(work: Callable[[], object]) -> float:
    """The seconds of one call."""
    clock = CLOCK[-1]
    begin = clock()
    work()
    return clock() - begin


CLOCK = [time.perf_counter]  # the last one measures


def on_cpu_time() -> None:
    """Measure seconds of CPU time, which other load hardly changes; of one thread, they are those of an idle machine."""
    CLOCK.append(time.process_time)


def taking_turns(a: Callable[[], object], b: Callable[[], object], rounds: int, tick: Callable[[], None]) -> list[float]:
    """Time of b ÷ time of a in each round, after one warm-up round; the one that runs first alternates."""
    ratios: list[float] = []
    for i in range(rounds + 1):
        if i % 2:
            of_b, of_a = seconds(b), seconds(a)
        else:
            of_a, of_b = seconds(a), seconds(b)
        ratios.append(of_b / of_a)
        tick()
    return ratios[1:]


def taking_steps(
    a: Callable[[int], object], b: Callable[[int], object], steps: int, rounds: int, tick: Callable[[], None]
) -> list[float]:
    """The same for work of many short steps: a and b alternate step by step, so that other load affects both alike. Returns
    the time of all steps of b ÷ that of a, in each round."""
    ratios: list[float] = []
    for _ in range(rounds + 1):
        of_a = of_b = 0.0
        for i in range(steps):
            if i % 2:
                of_b += seconds(lambda: b(i))  # noqa: B023  called at once
                of_a += seconds(lambda: a(i))  # noqa: B023
            else:
                of_a += seconds(lambda: a(i))  # noqa: B023
                of_b += seconds(lambda: b(i))  # noqa: B023
        ratios.append(of_b / of_a)
        tick()
    return ratios[1:]


@contextmanager
def progress(what: str, steps: int) -> Iterator[Callable[[], None]]:
    """A progress bar on stderr; yields the function that advances it."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=steps)
        yield lambda: bar.advance(task)


def arguments(about: str) -> argparse.ArgumentParser:
    """The flags of every benchmark."""
    parser = argparse.ArgumentParser(description=about.split("\n\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--quick", action="store_true", help="tiny shapes: tests that it runs; its figures mean nothing")
    parser.add_argument("--threads", type=int, default=2, help="threads of both sides")
    return parser


def versions() -> dict[str, str]:
    """The versions of a figure."""
    return {
        "dovetail": dovetail.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": str(torch.get_num_threads()),
    }


def report(
    rows: Sequence[Row], as_json: bool, further: Mapping[str, str] | None = None, peers: Mapping[str, Any] | None = None
) -> None:
    """Print the rows with the versions they were measured with; `further` are versions of other packages. `peers`: how each
    side that ours is compared with was run, its flags, environment and settings, as plain data."""
    used = {**versions(), **(further or {})}
    if as_json:
        data = {"rows": [row.data() for row in rows], "versions": used} | ({"peers": peers} if peers else {})
        print(json.dumps(data, ensure_ascii=False))
        return
    table = Table("figure", "value", "goal", "holds", "spread", caption=" · ".join(f"{k} {v}" for k, v in used.items()))
    for row in rows:
        spread = "–" if row.spread is None else f"{row.spread.width:.3f}"
        goal = "–" if row.goal is None else str(row.goal)
        table.add_row(row.name, f"{row.value:.3f}", goal, verdict(row.data()), spread)
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def agree(what: str, ours: torch.Tensor, theirs: torch.Tensor, within: float) -> None:
    """Stop unless the largest difference is at most `within` of the largest value."""
    apart = (ours - theirs).abs().max().item() / theirs.abs().max().clamp_min(1e-30).item()
    if not apart <= within:
        raise SystemExit(f"{what}: the two sides differ by {apart:.1e} of the largest value; nothing was timed")
