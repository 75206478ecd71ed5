"""Seed every known bug, one at a time: the law named with it must fail, and must hold on the same spec without the bug.

The bugs are listed by area, one file each (`mutants()`); most are public reports. A bug whose function no longer fits the code
that calls it does not count as caught: it fails for another reason.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import checks.oracles  # noqa: F401  registers the literal numbers
from checks.mutants import seeded
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
    quick: bool = False, only: Sequence[str] = (), tested: Callable[[dict[str, Any], int, int], None] | None = None
) -> dict[str, Any]:
    """Seed every bug, those of the laws in `only`, or with `quick` those whose law needs no second process and no compiler:
    {mutants, caught, rows}. `tested` is called with each row, the number of rows so far and that of all."""
    known_laws(only)
    bugs = [bug for bug in seeded_bugs().values() if not only or bug.law in only]
    chosen = [bug for bug in bugs if not (quick and bug.law in LAWS and LAWS[bug.law].slow)]
    rows: list[dict[str, Any]] = []
    unchanged: dict[tuple[str, str], str] = {}
    for bug in chosen:
        key = (bug.law, bug.spec.key)
        if key not in unchanged:
            unchanged[key] = without(bug)
        message = verdict_of(bug)
        caught = bool(message) and not unchanged[key] and not OUTDATED.search(message)
        if unchanged[key]:
            message = f"fails without the bug: {unchanged[key]}"
        elif not caught and message:
            message = f"the bug does not run: {message}"
        reason = f"{bug.law}: {message or 'holds'}"
        rows.append({"name": bug.name, "law": bug.law, "report": bug.report, "caught": caught, "by": reason})
        if tested is not None:
            tested(rows[-1], len(rows), len(chosen))
    return {"mutants": len(rows), "caught": sum(row["caught"] for row in rows), "rows": rows}
