"""The suite: every law on every cover, over two processes, and what came of it.

A **cell** is a distinct spec and a law that made at least one comparison. An exception that a part declares is tried too: it
must be seen to fail somewhere, or it is none. Dear laws (compiled, sharded) run on a subset that holds every part twice.
"""

from __future__ import annotations

import dataclasses as dc
import importlib
import multiprocessing as mp
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import Any

import torch

from dovetail.core.part import walk, walk_spec
from dovetail.io.spec import from_yaml, load_spec, to_yaml, zoo
from dovetail.lawbook import draws, kernel, loss, narrow, ported, programs, sequence, sharded, structure
from dovetail.lawbook.case import LAWS, Broken, Case, NotApplicable
from dovetail.lawbook.cover import PairCover, quick_specs
from dovetail.lawbook.oracle import ask_kinds, check_oracles
from dovetail.model import Model

__all__ = [
    "Report",
    "draws",
    "kernel",
    "loss",
    "narrow",
    "ported",
    "programs",
    "run_suite",
    "sequence",
    "sharded",
    "structure",
    "try_spec",
]

OWN_NUMBER = "own_number"  # law 14 is about kinds, not about specs
WORKERS = 2
SHARE = 6  # of the fields of each spec one in so many is changed: with hundreds of specs each still is, dozens of times
TWICE = 2  # how often each kind stands in the subset for slow laws
ENOUGH = 6  # cells after which a declared exception must have been seen to fail; by chance it may hold in a few


@dc.dataclass
class Outcome:
    """One law on one spec."""

    law: str
    state: str  # held, failed, excepted, excepted but held, not applicable
    detail: str = ""
    seconds: float = 0.0
    exceptions: list[tuple[str, str]] = dc.field(default_factory=list)  # (part, reason) that declared it


@dc.dataclass
class Report:
    """What came of a run."""

    parts: int = 0
    specs: int = 0
    pairs_covered: float = 0.0
    cells: int = 0
    not_applicable: int = 0
    seconds: float = 0.0
    by_law: dict[str, dict[str, Any]] = dc.field(default_factory=dict)
    failures: list[dict[str, str]] = dc.field(default_factory=list)
    excepted: dict[tuple[str, str, str], Counter[str]] = dc.field(default_factory=lambda: defaultdict(Counter))

    def take(self, spec: str, outcome: Outcome) -> None:
        """Count one outcome."""
        row = self.by_law.setdefault(outcome.law, {"cells": 0, "not_applicable": 0, "failed": 0, "excepted": 0, "seconds": 0.0})
        row["seconds"] += outcome.seconds
        if outcome.state == "not applicable":
            row["not_applicable"] += 1
            self.not_applicable += 1
            return
        row["cells"] += 1
        self.cells += 1
        for part, reason in outcome.exceptions:
            self.excepted[part, outcome.law, reason][outcome.state] += 1
        if outcome.exceptions:
            row["excepted"] += 1
        if outcome.state == "failed":
            row["failed"] += 1
            self.failures.append({"law": outcome.law, "spec": spec, "detail": outcome.detail})

    def end(self, seconds: float) -> Report:
        """Exceptions that were never seen to fail are failures."""
        self.seconds = seconds
        for (part, law, reason), states in self.excepted.items():
            if not states["excepted"] and sum(states.values()) >= ENOUGH:
                detail = (
                    f"{part} declares that this law cannot hold ({reason}), but it held in all {sum(states.values())} cells"
                )
                self.failures.append({"law": law, "spec": "", "detail": detail})
        return self

    def over_budget(self) -> dict[str, dict[str, float]]:
        """Laws that take longer per spec than their budget, with both numbers in seconds."""
        found: dict[str, dict[str, float]] = {}
        for name, row in self.by_law.items():
            if name in LAWS and row["cells"]:
                each = row["seconds"] / row["cells"]
                if each > LAWS[name].budget:
                    found[name] = {"seconds_per_spec": round(each, 2), "budget": LAWS[name].budget}
        return found

    def data(self) -> dict[str, Any]:
        """Plain data, as `--json` prints it."""
        excepted = [
            {"part": part, "law": law, "reason": reason, "cells": sum(states.values())}
            for (part, law, reason), states in sorted(self.excepted.items())
        ]
        return {
            "parts": self.parts,
            "laws": len(self.by_law),
            "specs": self.specs,
            "cells": self.cells,
            "pairs_covered": round(self.pairs_covered, 6),
            "failed": len(self.failures),
            "excepted": excepted,
            "excepted_share": round(sum(row["excepted"] for row in self.by_law.values()) / max(self.cells, 1), 4),
            "not_applicable": self.not_applicable,
            "by_law": {name: {**row, "seconds": round(row["seconds"], 2)} for name, row in self.by_law.items()},
            "over_budget": self.over_budget(),
            "seconds": round(self.seconds, 1),
            "failures": self.failures,
        }


def exceptions(spec: Model) -> dict[str, list[tuple[str, str]]]:
    """law -> (part, reason) for everything this spec's parts declare cannot hold."""
    found: dict[str, list[tuple[str, str]]] = {}
    for _, part, scope in walk(spec):
        for name, reason in part.excepts(scope).items():
            for law in (name, *(other.name for other in LAWS.values() if name in other.excepted_with)):
                if (part.kind, reason) not in found.setdefault(law, []):
                    found[law].append((part.kind, reason))
    return found


def try_law(case: Case, name: str, declared: list[tuple[str, str]]) -> Outcome:
    """One law on one case."""
    begin, before = time.process_time(), case.compared
    try:
        LAWS[name].check(case)
        state, detail = ("excepted but held" if declared else "held"), ""
        if case.compared == before:
            state, detail = "failed", "the law compared nothing"
    except NotApplicable as reason:
        state, detail = "not applicable", str(reason)
    except Broken as broken:
        state, detail = ("excepted" if declared else "failed"), str(broken)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        state, detail = "failed", f"{type(error).__name__}: {error} ({where.filename.rpartition('/')[2]}:{where.lineno})"
    return Outcome(name, state, detail, time.process_time() - begin, declared)


def try_spec(text: str, names: Iterable[str], seed: int = 0, share: int = 1) -> list[Outcome]:
    """Several laws on one spec, given as YAML; of its fields, every `share`-th one."""
    spec = from_yaml(text)
    case, declared = Case(spec, seed, share=share), exceptions(spec)
    return [try_law(case, name, declared.get(name, [])) for name in names]


def _start_worker(load: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    for module in load:  # parts of a stranger are registered in every process
        importlib.import_module(module)


def presets() -> list[Model]:
    """The small presets: laws hold for models people know, too."""
    return [load_spec(name) for name in zoo() if name.endswith("-tiny")]


def specs_of(cover: PairCover, quick: bool, seed: int) -> Iterator[Model]:
    """Those the reference knows, presets, then wirings."""
    known = ported.known_to_reference()
    if quick:
        yield from known[:: len(known) - 3]
        yield from quick_specs(seed)
        return
    yield from known
    yield from presets()
    yield from cover


def run_suite(
    quick: bool = False,
    seed: int = 0,
    told: Callable[[int, int, str], None] | None = None,
    load: tuple[str, ...] = (),
) -> Report:
    """Every law on every cover; `told` hears (specs done, specs known, the last law that failed); `load` names modules that
    register parts of a user's own."""
    begin = time.perf_counter()
    report, cover = Report(parts=len(ask_kinds())), PairCover(seed)
    for kind in ask_kinds():
        failed = check_oracles([kind])
        report.take(kind, Outcome(OWN_NUMBER, "failed" if failed else "held", "; ".join(map(str, failed))))
    cheap, slow = ([law.name for law in LAWS.values() if law.slow == wanted] for wanted in (False, True))
    seen: Counter[str] = Counter()
    known: set[str] = set()
    with ProcessPoolExecutor(WORKERS, mp.get_context("spawn"), _start_worker, (load,)) as workers:
        waiting: dict[Future[list[Outcome]], str] = {}
        for spec in specs_of(cover, quick, seed):
            text = to_yaml(spec)
            if text in known:
                continue
            known.add(text)
            kinds = {part.kind for _, part in walk_spec(spec)}
            names = cheap + (slow if not quick and any(seen[kind] < TWICE for kind in kinds) else [])
            seen.update(kinds)
            waiting[workers.submit(try_spec, text, names, seed, SHARE)] = text
            while len(waiting) > 8 * WORKERS:
                _collect(waiting, report, told, len(known))
        while waiting:
            _collect(waiting, report, told, len(known))
    report.specs, report.pairs_covered = len(known), cover.coverage()
    return report.end(time.perf_counter() - begin)


def _collect(waiting: dict[Future[list[Outcome]], str], report: Report, told: Callable[..., None] | None, known: int) -> None:
    done, _ = wait(waiting, return_when=FIRST_COMPLETED)
    for future in done:
        text = waiting.pop(future)
        for outcome in future.result():
            report.take(text, outcome)
        if told is not None:
            told(known - len(waiting), known, report.failures[-1]["law"] if report.failures else "")
