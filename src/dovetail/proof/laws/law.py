"""Laws: named equalities in a table per kind of subject (specs, foreign models, servers), and what the test of one gives.

FOREIGN = Laws()

@FOREIGN.law(3, "causal", "no later token changes an earlier output")
def causal(case: Foreign) -> None: ...

FOREIGN.test("causal", case)         Outcome("causal", "passed", …)
"""

from __future__ import annotations

import dataclasses as dc
import os
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from dovetail.base.errors import FileError
from dovetail.proof.compare.user_code import first_line

# specs with every pair of values that meet, where parts act on each other; with every value, for what is true of one part or
# one leaf; with every kind twice, for what is slow
Covers = Literal["pairs", "values", "kinds"]
MORE = 3  # further gaps that a report names


class Broken(Exception):
    """A law does not hold: what was compared, and by how much it differs."""


class NotApplicable(Exception):
    """A law does not apply to this subject."""


class LawCase:
    """What a law is tested on. It counts comparisons, and records gaps, so that a law continues after the first."""

    errors: tuple[type[Exception], ...] = (Exception,)  # those that fail a law; any other is a defect of ours
    nothing = ("failed", "the law compared nothing")  # the result of a law without a comparison

    def __init__(self) -> None:
        self.compared, self.gaps = 0, list[str]()

    def clock(self) -> float:
        """The seconds so far, of which a law's are reported."""
        return time.perf_counter()

    def true(self, holds: bool, what: str) -> None:
        """Require that `holds` is true."""
        self.compared += 1
        if not holds:
            self.gap(what)

    def gap(self, what: str) -> None:
        """Record that the law does not hold here."""
        self.gaps.append(what)

    def reset(self) -> None:
        """Begin a law."""
        self.compared, self.gaps = 0, []

    def settle(self) -> None:
        """Raise Broken where gaps were recorded: the first in full, the others counted."""
        if self.gaps:
            others = "; ".join(gap.split(":")[0] for gap in self.gaps[1 : 1 + MORE])
            raise Broken(self.gaps[0] + (f" (and {len(self.gaps) - 1} more: {others})" if others else ""))

    def summary(self) -> str:
        """What was compared, for the report of a law that passed."""
        return ""

    def raised(self, error: Exception) -> str:
        """The error of a law, and the file and line that raised it."""
        frames = traceback.extract_tb(error.__traceback__)
        where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
        return f"{first_line(error)}{where}"


@dc.dataclass
class Outcome:
    """The result of one law on one spec, foreign model or server. Plain data."""

    law: str
    state: str  # passed, failed, excepted, excepted but passed, not applicable
    detail: str = ""
    seconds: float = 0.0
    exceptions: list[tuple[str, str]] = dc.field(default_factory=list)  # (kind, reason) of the declared exceptions


@dc.dataclass(frozen=True)
class Law:
    """A named equality; its check may return a note on what it could not test."""

    name: str
    number: int
    says: str
    check: Callable[[Any], str | None]
    covers: Covers = "pairs"  # the sampled specs on which the suite tests it
    budget: float = 0.5  # seconds per spec, on average; the report lists laws over budget
    excepted_with: tuple[str, ...] = ()  # laws whose declared exceptions are exceptions from this one, too

    @property
    def slow(self) -> bool:
        """Whether a quick run leaves it out."""
        return self.covers == "kinds"


Check = TypeVar("Check", bound=Callable[[Any], str | None])


class Laws(dict[str, Law]):
    """The laws on one kind of subject, by name."""

    def law(
        self,
        number: int,
        name: str,
        says: str,
        covers: Covers = "pairs",
        excepted_with: tuple[str, ...] = (),
        budget: float = 0.5,
    ) -> Callable[[Check], Check]:
        """Register a law."""

        def decorate(check: Check) -> Check:
            self[name] = Law(name, number, says, check, covers, budget, excepted_with)
            return check

        return decorate

    def names(self, only: Sequence[str] = ()) -> list[str]:
        """The names of these laws, or of all, by number; FileError for an unknown name."""
        names = [law.name for law in sorted(self.values(), key=lambda law: law.number)]
        if unknown := set(only) - set(names):
            raise FileError(f"{sorted(unknown)[0]!r} is not a law for this model; laws: {', '.join(names)}")
        return [name for name in names if not only or name in only]

    def test(self, name: str, case: LawCase, declared: Sequence[tuple[str, str]] = ()) -> Outcome:
        """Test one law; `declared` are the exceptions to it that the parts of a spec declare."""
        begin = case.clock()
        case.reset()
        try:
            note = self[name].check(case)
            case.settle()
            state, detail = ("excepted but passed" if declared else "passed"), "; ".join(filter(None, (case.summary(), note)))
            if not case.compared:
                state, detail = case.nothing
        except NotApplicable as reason:
            state, detail = "not applicable", str(reason)
        except Broken as broken:
            state, detail = ("excepted" if declared else "failed"), str(broken)
        except case.errors as error:
            state, detail = "failed", case.raised(error)
        return Outcome(name, state, detail, round(case.clock() - begin, 3), list(declared))


PROCESSES = Path("/proc")  # of Linux; elsewhere only children that have ended are counted


def cpu_seconds() -> float:
    """The CPU time so far of this process, of its children that have ended, and of every descendant that runs."""
    times = os.times()
    return time.process_time() + times.children_user + times.children_system + _descendants()


def _descendants() -> float:
    children: dict[int, list[tuple[int, float]]] = defaultdict(list)  # by parent: (process, its seconds)
    for path in PROCESSES.glob("[0-9]*/stat"):
        try:
            _, _, rest = path.read_text(encoding="utf-8", errors="replace").rpartition(")")  # the name may hold anything
        except OSError:
            continue  # it has ended
        fields = rest.split()
        ticks = sum(map(int, fields[11:15]))  # utime, stime, and those of its children that have ended
        children[int(fields[1])].append((int(path.parent.name), ticks / os.sysconf("SC_CLK_TCK")))
    total, below = 0.0, [os.getpid()]
    while below:
        for process, seconds in children[below.pop()]:
            total += seconds
            below.append(process)
    return total
