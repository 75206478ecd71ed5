"""Seed every known bug, one at a time: the law named with it must fail, and must hold on the same spec without the bug.

The bugs are listed by area, one file each (`mutants()`); most are public reports. A bug whose function no longer fits the code
that calls it does not count as caught: it fails for another reason.
"""

from __future__ import annotations

import importlib
import multiprocessing as mp
import pkgutil
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

import checks.oracles  # noqa: F401  registers the literal numbers
from checks.mutants import seeded
from dovetail.data.executors import end_with_parent
from dovetail.proof.laws.case import LAWS, NotApplicable
from dovetail.proof.laws.mutant import Mutant, verdict
from dovetail.proof.laws.suite import known_laws

__all__ = ["areas", "run_seeded", "seeded_bugs", "verdict_of"]

# how a wrong function fails that is called in another way, or returns something else, than the right one
OUTDATED = re.compile(r"\b(TypeError|AttributeError|NameError|values to unpack)\b")


def areas() -> dict[str, list[Mutant]]:
    """The seeded bugs by the file that lists them."""
    names = sorted(info.name for info in pkgutil.iter_modules(seeded.__path__))
    return {name: importlib.import_module(f"{seeded.__name__}.{name}").mutants() for name in names}


def seeded_bugs() -> dict[str, Mutant]:
    """Every seeded bug by its name."""
    return {bug.name: bug for rows in areas().values() for bug in rows}


def seed_by_name(name: str) -> AbstractContextManager[Any]:
    """Seed the bug of this name: ranks are sent the name, since a patch cannot be pickled."""
    return seeded_bugs()[name].seed()


def verdict_of(bug: Mutant) -> str:
    """The verdict of the bug's law on its spec, with the bug seeded here and in the ranks; empty where it is not caught."""
    with bug.seed():
        try:
            return verdict(bug.law, bug.spec, partial(seed_by_name, bug.name))
        except NotApplicable:
            return ""


def without(bug: Mutant) -> str:
    """The verdict of the bug's law on its spec without the bug: it must be empty."""
    try:
        return verdict(bug.law, bug.spec)
    except NotApplicable as reason:
        return f"not applicable: {reason}"


def run_seeded(
    quick: bool = False,
    only: Sequence[str] = (),
    tested: Callable[[dict[str, Any], int, int], None] | None = None,
    workers: int = 1,
) -> dict[str, Any]:
    """Seed every bug, those of the laws in `only`, or with `quick` those whose law needs no second process and no compiler:
    {mutants, caught, rows}. `tested` is called with each row, the number of rows so far and that of all. With several
    `workers`, bugs whose law is not slow run in as many processes, with one thread each."""
    known_laws(only)
    together: dict[tuple[str, str], list[Mutant]] = {}  # by law and spec, which has to hold without the bug
    bugs = [bug for bug in seeded_bugs().values() if not only or bug.law in only]
    chosen = [bug for bug in bugs if not (quick and _slow(bug))]
    for bug in chosen:
        together.setdefault((bug.law, bug.spec.key), []).append(bug)
    rows: list[dict[str, Any]] = []
    for row in _in_processes(list(together.values()), workers) if workers > 1 else _in_order(together.values()):
        rows.append(row)
        if tested is not None:
            tested(row, len(rows), len(chosen))
    order = {bug.name: i for i, bug in enumerate(chosen)}
    rows.sort(key=lambda row: order[row["name"]])
    return {"mutants": len(rows), "caught": sum(row["caught"] for row in rows), "rows": rows}


def _slow(bug: Mutant) -> bool:
    """Whether the law of a bug starts processes or compiles."""
    return bug.law in LAWS and LAWS[bug.law].slow


def _in_order(groups: Iterable[Sequence[Mutant]]) -> Iterator[dict[str, Any]]:
    for bugs in groups:
        unchanged = without(bugs[0])
        yield from (_judge(bug, unchanged) for bug in bugs)


def _in_processes(groups: Sequence[Sequence[Mutant]], workers: int) -> Iterator[dict[str, Any]]:
    fast = [bugs for bugs in groups if not _slow(bugs[0])]
    with ProcessPoolExecutor(workers, mp.get_context("spawn"), _start_worker) as pool:
        for future in as_completed([pool.submit(_judge_named, [bug.name for bug in bugs]) for bugs in fast]):
            yield from future.result()
    yield from _in_order(bugs for bugs in groups if _slow(bugs[0]))


def _start_worker() -> None:
    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(1)


def _judge_named(names: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of bugs of one law and spec: a patch cannot be pickled, so a process gets their names."""
    bugs = seeded_bugs()
    return list(_in_order([[bugs[name] for name in names]]))


def _judge(bug: Mutant, unchanged: str) -> dict[str, Any]:
    """The row of a bug; `unchanged` is the verdict on its spec without it."""
    message = verdict_of(bug)
    caught = bool(message) and not unchanged and not OUTDATED.search(message)
    if unchanged:
        message = f"fails without the bug: {unchanged}"
    elif not caught and message:
        message = f"the bug does not run: {message}"
    reason = f"{bug.law}: {message or 'holds'}"
    return {"name": bug.name, "law": bug.law, "report": bug.report, "caught": caught, "by": reason}
