"""A recipe: an experiment in one file whose figures have goals, run over seeds, printed, stored and drawn.

    RECIPE = dt.Recipe(experiment, draw, full=Setup(), quick=QUICK, faults={"shuffled": "accuracy"})
    if __name__ == "__main__":
        sys.exit(RECIPE.main())                     python NAME.py [--seeds N] [--quick] [--fault NAME] [--out DIR]

`experiment(setup, seed, fault)` returns its figures, each with the lowest and the highest value that hold, and what the picture
shows; `draw(figure, runs)` fills the picture of all seeds. A fault is a mistake that can be made on purpose (labels shuffled, a
part removed): its figure then has to miss the goal, so that the goal is known to test something.
"""

from __future__ import annotations

import argparse
import dataclasses as dc
import inspect
import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from dovetail.base.errors import DovetailError
from dovetail.base.keywords import checks_keywords
from dovetail.disk.atomic import writing
from dovetail.views.figure import new_figure, quiet, write_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Goal = tuple[float, float | None, float | None]  # value, lowest and highest that hold


@checks_keywords
@dc.dataclass(frozen=True)
class Recipe:
    """An experiment with goals, its picture, its sizes, its faults (→ the figure that each must move past its goal), and the
    flags that it has of its own (→ their help; the experiment takes them as keyword arguments, None where not given)."""

    experiment: Callable[..., tuple[Mapping[str, Goal], Any]]
    draw: Callable[[Figure, list[Any]], None]
    full: Any
    quick: Any
    faults: Mapping[str, str]
    options: Mapping[str, str] = dc.field(default_factory=dict[str, str])
    size: tuple[float, float] = (13, 3.6)  # inches of the picture

    def main(self, arguments: list[str] | None = None) -> int:
        """Run the seeds, print each figure beside its goal, write figures.json and the picture; 1 where a goal is missed."""
        source = Path(inspect.getfile(self.experiment))
        flags = self._parser(source.stem).parse_args(arguments)
        own = {name: getattr(flags, name) for name in self.options}
        missed, runs, table = 0, list[Any](), dict[str, Any]()
        try:
            for seed in range(flags.seeds):
                start = time.perf_counter()
                figures, shown = self.experiment(self.quick if flags.quick else self.full, seed, flags.fault, **own)
                seconds = time.perf_counter() - start
                runs.append(shown)
                table[str(seed)] = {"seconds": round(seconds, 1), "figures": figures}
                _say(f"seed {seed}, {seconds:.0f} s")
                for name, goal in figures.items():
                    _say(f"  {'holds' if holds(goal) else 'FAILS':6} {name:72} {goal[0]:8.3f}   {stated(goal)}")
                    missed += not holds(goal)
            self._write(flags.out, source.stem, table, runs)
        except DovetailError as error:
            _say(f"error: {error}", sys.stderr)
            return 2
        _say(f"{missed} goals missed" if missed else "every goal holds")
        return bool(missed)

    def _parser(self, name: str) -> argparse.ArgumentParser:
        about = (sys.modules[self.experiment.__module__].__doc__ or "").split("\n")[0]
        parser = argparse.ArgumentParser(prog=f"{name}.py", description=about, allow_abbrev=False)
        parser.add_argument("--seeds", type=_count, default=1, metavar="N", help="how many seeds, from 0 (default: 1)")
        parser.add_argument("--quick", action="store_true", help="smaller sizes: seconds")
        parser.add_argument("--fault", choices=list(self.faults), help="a mistake on purpose: a goal must be missed")
        parser.add_argument("--out", type=Path, default=Path(name), metavar="DIR", help=f"for {name}.png and figures.json")
        for option, text in self.options.items():
            parser.add_argument(f"--{option.replace('_', '-')}", dest=option, help=text)
        return parser

    def _write(self, out: Path, name: str, table: Mapping[str, Any], runs: list[Any]) -> None:
        """The figures, and the picture where matplotlib is installed."""
        out.mkdir(parents=True, exist_ok=True)
        with writing(out / "figures.json") as file:
            file.write((json.dumps(table, indent=1) + "\n").encode())
        try:
            figure = new_figure(*self.size)
        except DovetailError as error:
            _say(f"no picture: {error}")
            return
        self.draw(figure, runs)
        for axes in figure.axes:
            quiet(axes)
        write_figure(figure, out / f"{name}.png")
        _say(f"picture: {out / f'{name}.png'}")


def holds(goal: Goal) -> bool:
    """Whether the value is finite and within its limits."""
    value, low, high = goal
    return math.isfinite(value) and (low is None or value >= low) and (high is None or value <= high)


def stated(goal: Goal) -> str:
    """The limits in words: "≥ 0.9 and ≤ 1"; empty where there is none."""
    _, low, high = goal
    return " and ".join(f"{sign} {limit:g}" for sign, limit in (("≥", low), ("≤", high)) if limit is not None)


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 100:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seeds from 1 to 100")
    return int(text)


def _say(text: str, file: TextIO | None = None) -> None:
    (file or sys.stdout).write(f"{text}\n")
    (file or sys.stdout).flush()
