"""The page of results: the goals that hold, fail or are undecided, and every figure with the commit it was measured at."""

from __future__ import annotations

import dataclasses as dc
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from figures import TABLE, Standing, standings
from markdown_table import table
from measure import verdict
from measured import Closure

ROOT = Path(__file__).parents[1]
HEAD = ("row", "value", "goal", "verdict")


@dc.dataclass(frozen=True)
class Measured:
    """A figure with rows, and why it is older than the sources; empty if it is not."""

    standing: Standing
    rows: list[dict[str, Any]]
    older: str

    def of(self, *words: str) -> list[dict[str, Any]]:
        """The rows whose verdict begins with one of these words."""
        return [row for row in self.rows if verdict(row).startswith(words)]

    @property
    def goals(self) -> int:
        """The number of rows with a goal."""
        return len(self.of("yes", "NO", "too"))

    @property
    def commit(self) -> str:
        """The commit it was measured at."""
        return self.standing.commit or "not recorded"


def results() -> Iterator[str]:
    """The page."""
    yield "# Results\n"
    yield "A goal **holds** if the whole interval of the figure (the median ± one interquartile range of at least five rounds)"
    yield "is within it, and **fails** if the whole interval is outside. **Too noisy**: the interval crosses the limit."
    yield "**Too few rounds**: there is no interval. **No goal**: the row states a value and promises nothing. Counts and bytes"
    yield "are exact. Two figures measure llama.cpp in different ways and disagree, so that rows against it support no claim;"
    yield "how servers were compared is in [](../serve.md).\n"
    yield from page(measured_figures(standings()))


def page(figures: Sequence[Measured]) -> Iterator[str]:
    """The sections, from figures with rows."""
    held = [(figure, figure.of("yes")) for figure in figures]
    failed = [(figure, row) for figure in figures for row in figure.of("NO")]
    open_rows = [(figure, row) for figure in figures for row in figure.of("too")]
    total = sum(len(rows) for _, rows in held)
    yield f"{len(figures)} figures: {total} goals hold, {len(failed)} fail, {len(open_rows)} are undecided.\n"
    yield "## Holds\n"
    lines = [
        (f"`{figure.standing.name}`", f"{len(rows)} of {figure.goals}", figure.commit, command(figure))
        for figure, rows in sorted(
            held, key=lambda one: (-len(one[1]) / max(1, len(one[0].of("yes", "NO", "too"))), -len(one[1]))
        )
        if rows
    ]
    yield from table(("figure", "goals that hold", "measured at", "command"), lines)
    yield "## Fails\n"
    yield from table(("figure", *HEAD[:3], "measured at"), [(name(f), *cells(row), f.commit) for f, row in failed])
    yield "## Undecided\n"
    yield from table(("figure", *HEAD, "measured at"), [(name(f), *cells(row), verdict(row), f.commit) for f, row in open_rows])
    yield "## Figures of the present sources\n"
    fresh = [figure for figure in figures if not figure.older]
    if not fresh:
        yield "None: files that they measure have changed since each of them was measured.\n"
    for figure in fresh:
        yield f"### {figure.standing.name}\n\n{command(figure)}, measured at {figure.commit}.\n"
        yield from rows_of(figure)
    yield "## Older figures\n"
    yield "Each holds for the commit that it was measured at. Open one for its rows.\n"
    for figure in figures:
        if figure.older:
            yield f"<details><summary><code>{figure.standing.name}</code>: {figure.older}</summary>\n\n{command(figure)}\n"
            yield from rows_of(figure)
            yield "</details>\n"


def measured_figures(found: Sequence[Standing]) -> list[Measured]:
    """The figures that were measured."""
    closure = Closure(ROOT)
    return [
        Measured(standing, stored(standing.result), "" if standing.state == "fresh" else reason(standing, closure))
        for standing in found
        if standing.state != "not taken"
    ]


def reason(standing: Standing, closure: Closure) -> str:
    """Why a figure counts as older than the sources."""
    if not standing.commit:
        return "no commit was recorded with it"
    files = {str(path.relative_to(ROOT)) for path in closure.of(TABLE[standing.name].command)}
    diff = ["git", "diff", "--name-only", standing.commit.rstrip("+"), "--", "src", "benchmarks"]
    done = subprocess.run(diff, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:  # a copy without the history
        return f"measured at {standing.commit}; files that it measures have changed since"
    changed = len(files & {*done.stdout.split()})
    return f"measured at {standing.commit}; {changed} of the {len(files)} files that it measures have changed since"


def stored(result: Any) -> list[dict[str, Any]]:
    """The rows of a stored result; of seeded bugs and mutations, their counts."""
    if not isinstance(result, dict):
        return []
    if "caught" in result:
        row = {"name": f"caught, of {result['mutants']}", "value": result["caught"], "goal": None, "holds": None}
        return [row]
    rows = result.get("rows")
    listed = rows if isinstance(rows, list) else []
    return [row for row in listed if isinstance(row, dict) and {"name", "value", "goal", "holds"} <= set(row)]


def name(figure: Measured) -> str:
    """The name of a figure, as code."""
    return f"`{figure.standing.name}`"


def command(figure: Measured) -> str:
    """Its command, as code."""
    return f"`{TABLE[figure.standing.name].command}`"


def cells(row: dict[str, Any]) -> tuple[str, str, str]:
    """Name, value with its interval, and goal of a row."""
    spread = row.get("spread")
    return row["name"], f"{row['value']:g}" + (f" ± {spread:g}" if spread else ""), row["goal"] or "no goal"


def rows_of(figure: Measured) -> Iterator[str]:
    """All rows of a figure."""
    if figure.rows:
        yield from table(HEAD, [(*cells(row), verdict(row)) for row in figure.rows])
    else:
        yield "Its result is a table of its own; see the file in `docs/figures`.\n"
