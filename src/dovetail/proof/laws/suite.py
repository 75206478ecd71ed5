"""The suite: every law on every sampled spec, in two processes, and the report.

A **cell** is a distinct spec and a law that made at least one comparison. A law also runs where a part declares an exception to
it: if it then holds everywhere, the exception is wrong, and that is a failure. A law declares the specs that it runs on
(`Law.covers`): those that have every pair of values, every value, or every kind twice.
"""

from __future__ import annotations

import dataclasses as dc
import multiprocessing as mp
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

from dovetail.base.extensions import load_parts, loaded
from dovetail.data.executors import end_with_parent
from dovetail.files.spec import from_yaml, load_spec, to_yaml, zoo
from dovetail.model.model import Model
from dovetail.proof.laws import (  # noqa: F401  each registers its laws
    adapted,
    compiled,
    device,
    drafted,
    draws,
    evicted,
    invariant,
    kernel,
    looking,
    loss,
    narrow,
    ported,
    positions,
    programs,
    quantized,
    replaced,
    sequence,
    sharded,
    structure,
)
from dovetail.proof.laws.case import LAWS, Case
from dovetail.proof.laws.cover import PairCover, quick_specs
from dovetail.proof.laws.law import Covers, Outcome
from dovetail.proof.laws.oracle import check_oracles, grouped_kinds, kinds_to_test
from dovetail.proof.laws.record import Record
from dovetail.spec.part import walk, walk_spec

OWN_NUMBER = "own_number"  # law 14: it tests kinds, not specs
WORKERS = 2
SHARE = 6  # one in so many fields of each spec is changed; over hundreds of specs each field is changed dozens of times
SPECS_PER_KIND = 2  # specs with each kind for laws that cover kinds
ENOUGH = 12  # cells after which a law with a declared exception must have failed once; in a few it may hold by chance


@dc.dataclass
class Report:
    """The counts and failures of a run."""

    parts: int = 0
    specs: int = 0
    pairs_covered: float = 0.0
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
            return
        row["cells"] += 1
        row["excepted"] += bool(outcome.exceptions)
        for part, reason in outcome.exceptions:
            self.excepted[part, outcome.law, reason][outcome.state] += 1
        if outcome.state == "failed":
            row["failed"] += 1
            self.failures.append({"law": outcome.law, "spec": spec, "detail": outcome.detail})

    def total(self, count: str) -> int:
        """The sum of a count over all laws."""
        return sum(row[count] for row in self.by_law.values())

    def end(self, seconds: float) -> Report:
        """Add a failure for every exception whose law passed in all cells."""
        self.seconds = seconds
        for (part, law, reason), states in self.excepted.items():
            if not states["excepted"] and sum(states.values()) >= ENOUGH:
                detail = (
                    f"{part} declares that this law cannot hold ({reason}), but it passed in all {sum(states.values())} cells"
                )
                self.failures.append({"law": law, "spec": "", "detail": detail})
        return self

    def over_budget(self) -> dict[str, dict[str, float]]:
        """Laws that take longer per spec than their budget, with both numbers in seconds."""
        over: dict[str, dict[str, float]] = {}
        for name, row in self.by_law.items():
            if name in LAWS and row["cells"]:
                each = row["seconds"] / row["cells"]
                if each > LAWS[name].budget:
                    over[name] = {"seconds_per_spec": round(each, 2), "budget": LAWS[name].budget}
        return over

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
            "cells": self.total("cells"),
            "pairs_covered": round(self.pairs_covered, 6),
            "failed": len(self.failures),
            "excepted": excepted,
            "excepted_share": round(self.total("excepted") / max(self.total("cells"), 1), 4),
            "not_applicable": self.total("not_applicable"),
            "by_law": {name: {**row, "seconds": round(row["seconds"], 2)} for name, row in self.by_law.items()},
            "over_budget": self.over_budget(),
            "seconds": round(self.seconds, 1),
            "failures": self.failures,
        }


def exceptions(spec: Model) -> dict[str, list[tuple[str, str]]]:
    """law -> [(kind, reason)]: the exceptions that the parts of a spec declare."""
    by_law: dict[str, list[tuple[str, str]]] = {}
    for _, part, scope in walk(spec):
        for name, reason in part.proof.excepts(part, scope).items():
            for law in (name, *(other.name for other in LAWS.values() if name in other.excepted_with)):
                if (part.kind, reason) not in by_law.setdefault(law, []):
                    by_law[law].append((part.kind, reason))
    return by_law


def known_laws(only: Sequence[str]) -> tuple[str, ...]:
    """`only`, where each names a law of sampled specs; FileError for an unknown name."""
    LAWS.names([name for name in only if name != OWN_NUMBER])
    return tuple(only)


def try_spec(text: str, names: Iterable[str], seed: int = 0, share: int = 1) -> list[Outcome]:
    """Test several laws on one spec, given as YAML; repeated tests run one in `share` times (see `Case`)."""
    spec = from_yaml(text)
    case, declared = Case(spec, seed, share=share), exceptions(spec)
    return [LAWS.test(name, case, declared.get(name, ())) for name in names]


def _start_worker(load: tuple[str, ...]) -> None:
    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    load_parts(load)


def presets() -> list[Model]:
    """The small presets."""
    return [load_spec(name) for name in zoo() if name.endswith("-tiny")]


def specs_of(cover: PairCover, quick: bool, seed: int) -> Iterator[tuple[Model, Covers]]:
    """Specs that Hugging Face can express, then presets, then sampled specs with every value; then those for pairs."""
    known = ported.known_to_reference()
    if quick:
        yield from _covering("values", [*known[:: len(known) - 3], *quick_specs(seed)])
        return
    yield from _covering("values", [*known, *presets()])
    yield from _covering("values", cover.each_value())
    yield from _covering("pairs", cover.each_pair())


def _covering(covers: Covers, specs: Iterable[Model]) -> Iterator[tuple[Model, Covers]]:
    return ((spec, covers) for spec in specs)


def run_suite(
    quick: bool = False,
    seed: int = 0,
    progress: Callable[[int, int, str], None] | None = None,
    load: tuple[str, ...] = (),
    record: str | Path | None = None,
    only: Sequence[str] = (),
    tested: Callable[[list[Outcome]], None] | None = None,
) -> Report:
    """Test every law on every spec, or the laws of `only`. `progress` is called with (specs done, specs so far, the last law
    that failed), `tested` with the outcomes of each spec; `load` names modules that register a user's own parts. With a
    `record`, outcomes are appended to this file, and those that it has are not found again."""
    recorded = None if record is None else Record(record, quick=quick, seed=seed, load=list(load), only=sorted(only))
    begin = time.perf_counter()
    report, cover = Report(parts=len(grouped_kinds())), PairCover(seed)
    for kind in kinds_to_test() if not only or OWN_NUMBER in only else ():
        failed = check_oracles([kind])
        report.take(kind, Outcome(OWN_NUMBER, "failed" if failed else "passed", "; ".join(map(str, failed))))
    specs_with: Counter[str] = Counter()  # by kind
    known: set[str] = set()
    with ProcessPoolExecutor(WORKERS, mp.get_context("spawn"), _start_worker, ((*load, *loaded()),)) as workers:
        waiting: dict[Future[list[Outcome]], str] = {}
        for spec, covers in specs_of(cover, quick, seed):
            text = to_yaml(spec)
            if text in known:
                continue
            known.add(text)
            kinds = {part.kind for _, part in walk_spec(spec)}
            wanted: set[Covers] = {"pairs", covers}
            if not quick and any(specs_with[kind] < SPECS_PER_KIND for kind in kinds):
                wanted.add("kinds")
            names = [law.name for law in LAWS.values() if law.covers in wanted and (not only or law.name in only)]
            if quick and only:  # a slow law that is named runs on the few specs, too
                names = [name for name in LAWS if name in only]
            specs_with.update(kinds)
            if not names:
                continue
            if recorded is not None and text in recorded.outcomes:
                for outcome in recorded.outcomes[text]:
                    report.take(text, outcome)
                continue
            waiting[workers.submit(try_spec, text, names, seed, SHARE)] = text
            while len(waiting) > 8 * WORKERS:
                _collect(waiting, report, progress, len(known), recorded, tested)
        while waiting:
            _collect(waiting, report, progress, len(known), recorded, tested)
    report.specs, report.pairs_covered = len(known), cover.coverage()
    return report.end(time.perf_counter() - begin)


def _collect(
    waiting: dict[Future[list[Outcome]], str],
    report: Report,
    progress: Callable[..., None] | None,
    known: int,
    record: Record | None,
    tested: Callable[[list[Outcome]], None] | None,
) -> None:
    done, _ = wait(waiting, return_when=FIRST_COMPLETED)
    for future in done:
        text, outcomes = waiting.pop(future), future.result()
        for outcome in outcomes:
            report.take(text, outcome)
        if record is not None:
            record.add(text, outcomes)
        if tested is not None:
            tested(outcomes)
        if progress is not None:
            progress(known - len(waiting), known, report.failures[-1]["law"] if report.failures else "")
