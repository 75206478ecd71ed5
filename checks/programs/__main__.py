"""The command: `python -m checks.programs`; see the package."""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

import dovetail
from checks.programs import __doc__ as about
from checks.programs.frame import Kind, run, sample, script, shrink
from checks.programs.kinds import KINDS, kind_of
from checks.programs.mutants import MOST, MUTANTS, found

EACH = 5.0  # seconds between two reports of progress


def main(given: Sequence[str] | None = None) -> int:
    """Run programs, or mutants; return the exit code."""
    parser = argparse.ArgumentParser("checks.programs", description=(about or "").split("\n\n")[0])
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"names, separated by commas; all: {', '.join(KINDS)}")
    parser.add_argument("--programs", type=int, default=2000, help="in all, over the kinds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--failures", type=int, default=3, help="a kind ends after as many failing programs")
    parser.add_argument("--mutants", action="store_true", help="put known bugs back, and count the programs that find each")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    options = parser.parse_args(given)
    torch.set_num_threads(1)  # programs are small: threads would wait for each other
    if options.mutants:
        rows = run_mutants(options.kinds.split(","), options.seed)
    else:
        kinds = [kind_of(name) for name in options.kinds.split(",")]
        rows = run_kinds(kinds, options.programs, options.seed, options.failures)
    return report(rows, options.json)


def run_kinds(kinds: Sequence[Kind], programs: int, seed: int, failures: int) -> list[dict[str, Any]]:
    """Run programs of each kind, in proportion to their shares; return the rows of the report."""
    rows: list[dict[str, Any]] = []
    ran_in_all = failed_in_all = 0
    for kind in kinds:
        count = max(round(programs * kind.share / sum(other.share for other in kinds)), 1)
        ran, failed, seconds = run_kind(kind, count, seed, failures)
        rows += [row(f"programs, {kind.name}", ran), row(f"failed programs, {kind.name}", failed, goal=0)]
        rows.append(row(f"seconds, {kind.name}", seconds))
        ran_in_all, failed_in_all = ran_in_all + ran, failed_in_all + failed
    return [*rows, row("programs, all kinds", ran_in_all), row("failed programs, all kinds", failed_in_all, goal=0)]


def run_kind(kind: Kind, count: int, seed: int, failures: int) -> tuple[int, int, float]:
    """Run `count` programs of a kind; return how many ran, how many failed, and the seconds."""
    begin = reported = time.monotonic()
    ran = failed = 0
    while ran < count and failed < failures:
        program = sample(kind, seed, ran)
        ran += 1
        if (failure := run(kind, program)) is not None:
            failed += 1
            say(f"{kind.name}, {program.origin}: {failure}; shrinking")
            say(script(*shrink(kind, program, failure)))
        if time.monotonic() - reported > EACH:
            reported = time.monotonic()
            say(f"{kind.name}: {ran} of {count} programs, {failed} failed, {reported - begin:.0f} s")
    return ran, failed, time.monotonic() - begin


def run_mutants(kinds: Sequence[str], seed: int) -> list[dict[str, Any]]:
    """Put the known bugs of some kinds back, one at a time; return a row for each: the programs that found it."""
    rows: list[dict[str, Any]] = []
    for mutant in MUTANTS:
        if mutant.kind in kinds:
            result = found(mutant, seed)
            say(f"{mutant.name}: {'not found' if result is None else f'{result[0]} programs; {result[1]}'}")
            rows.append(row(f"programs until found, {mutant.name}", MOST + 1 if result is None else result[0], goal=MOST))
    return rows


def row(name: str, value: float, goal: float | None = None) -> dict[str, Any]:
    """A row of the report, as benchmarks have them; the goal is an upper bound."""
    holds = None if goal is None else value <= goal
    return {
        "name": name,
        "value": round(value, 2),
        "goal": None if goal is None else f"≤ {goal:g}",
        "holds": holds,
        "spread": None,
    }


def report(rows: Sequence[dict[str, Any]], as_json: bool) -> int:
    """Print the rows; return the exit code."""
    if as_json:
        versions = {"dovetail": dovetail.__version__, "torch": torch.__version__, "python": platform.python_version()}
        print(json.dumps({"rows": list(rows), "versions": versions}, ensure_ascii=False))
    else:
        for one in rows:
            print(f"{one['name']:40} {one['value']:>10g}  {'' if one['goal'] is None else one['goal']}")
    return int(any(one["holds"] is False for one in rows))


def say(text: str) -> None:
    """Print to stderr."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
