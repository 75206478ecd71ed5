"""Seed every known bug, one at a time: the law named with it must fail, and must hold on the same spec without the bug.

A law that has never failed proves nothing. The bugs are listed by area, one file each (`mutants()`); most are public reports. A
bug whose function no longer fits the code that calls it does not count as caught: it fails for another reason.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Sequence
from typing import Any

from dovetail.core.part import walk_spec
from dovetail.io.spec import to_yaml
from dovetail.lawbook import seeded, sharded
from dovetail.lawbook.case import LAWS, RELATION, Broken, Case, NotApplicable
from dovetail.lawbook.oracle import ORACLES, check_oracles
from dovetail.lawbook.seeded.bug import Mutant
from dovetail.lawbook.suite import OWN_NUMBER
from dovetail.model import Model

# how a wrong function fails that is called in another way, or returns something else, than the right one
OUTDATED = re.compile(r"\b(TypeError|AttributeError|NameError|values to unpack)\b")
MACHINERY = ("bug", "run")  # every other module of the package lists the seeded bugs of one area


def areas() -> dict[str, list[Mutant]]:
    """The seeded bugs by the file that lists them."""
    names = sorted(info.name for info in pkgutil.iter_modules(seeded.__path__) if info.name not in MACHINERY)
    return {name: importlib.import_module(f"{seeded.__name__}.{name}").mutants() for name in names}


def seeded_bugs() -> dict[str, Mutant]:
    """Every seeded bug by its name."""
    return {bug.name: bug for rows in areas().values() for bug in rows}


def verdict(law: str, model: Model, bug: str | None = None) -> str:
    """The message with which the law fails on a model, empty where it holds; `bug` names the bug that is seeded, if any."""
    if law == OWN_NUMBER:
        kinds = {part.kind for _, part in walk_spec(model) if part.kind in ORACLES} | {"rope", "window"}
        return "; ".join(str(failure) for failure in check_oracles(sorted(kinds))[:1])
    if law == "sharded":
        return _sharded(model, bug)
    try:
        LAWS[law].check(Case(model))
    except NotApplicable as reason:
        return f"not applicable: {reason}" if bug is None else ""
    except Broken as broken:
        return str(broken)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return ""


def _sharded(model: Model, bug: str | None) -> str:
    """The sharded law with the bug seeded in the ranks themselves."""
    results = sharded.worse(sharded.the_pair().run(compare_seeded, bug, to_yaml(model)))
    for how, result in results.items():
        name, gap = result.worst
        if not gap <= RELATION:
            return f"{how}, {name} differs by {gap:.3g}"
    return ""


def compare_seeded(bug: str | None, text: str) -> dict[str, sharded.Compared]:
    """The job of one rank: compare the whole model with the sharded ones, with a bug seeded."""
    if bug is None:
        return sharded.compare(text, 0, tuple(sharded.WAYS))
    with seeded_bugs()[bug].seed():
        return sharded.compare(text, 0, tuple(sharded.WAYS))


def run_seeded(
    progress: Callable[[int, int, str], None] | None = None,
    quick: bool = False,
    only: Sequence[str] = (),
    tested: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Seed every bug, those of the laws in `only`, or with `quick` those whose law needs no second process and no compiler:
    {mutants, caught, rows}. `tested` is called with each row."""
    bugs = [bug for bug in seeded_bugs().values() if not only or bug.law in only]
    chosen = [bug for bug in bugs if not (quick and bug.law in LAWS and LAWS[bug.law].slow)]
    rows: list[dict[str, Any]] = []
    without: dict[tuple[str, str], str] = {}
    for i, bug in enumerate(chosen):
        if progress is not None:
            progress(i, len(chosen), bug.name)
        key = (bug.law, bug.spec.key)
        if key not in without:
            without[key] = verdict(bug.law, bug.spec)
        with bug.seed():
            message = verdict(bug.law, bug.spec, bug.name)
        caught = bool(message) and not without[key] and not OUTDATED.search(message)
        if without[key]:
            message = f"fails without the bug: {without[key]}"
        elif not caught and message:
            message = f"the bug does not run: {message}"
        reason = f"{bug.law}: {message or 'holds'}"
        rows.append({"name": bug.name, "law": bug.law, "report": bug.report, "caught": caught, "by": reason})
        if tested is not None:
            tested(rows[-1])
    return {"mutants": len(rows), "caught": sum(row["caught"] for row in rows), "rows": rows}
