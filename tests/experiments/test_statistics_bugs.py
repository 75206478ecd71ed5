"""Bugs planted in the statistics of a lab: the test that is named with each must fail with it."""

from __future__ import annotations

import importlib
import operator
import sys
from pathlib import Path
from types import ModuleType

import pytest
import test_lab

sys.path.insert(0, str(Path(__file__).parents[1] / "planted"))
import run as planted
from bugs import Bug
from lab_statistics import STATISTICS

place = test_lab.place  # the fixture: its runs are drawn in a directory of their own


@pytest.mark.parametrize("bug", STATISTICS, ids=lambda bug: bug.breaks)
def test_a_bug_in_the_statistics_is_caught(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    path, text = planted.place(bug)
    name = f"dovetail.experiments.{path.stem}"
    mutated = ModuleType(name)
    mutated.__dict__["__name__"] = name
    exec(compile(text, str(path), "exec"), mutated.__dict__)
    find = operator.attrgetter(bug.function)
    monkeypatch.setattr(find(importlib.import_module(name)), "__code__", find(mutated).__code__)
    module, _, test = STATISTICS[bug].partition(".")
    with pytest.raises(AssertionError):
        getattr(importlib.import_module(module), test)()
