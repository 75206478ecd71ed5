"""The pytest plugin: laws on the models of a user's own repository, one test item per law.

    pytest --dovetail py:package.models:tiny --dovetail hf:checkpoint  adds these items to the collected tests
    [tool.pytest.ini_options]
    dovetail = ["py:package.models:tiny"]                              the same, in every run

A side is anything that `dovetail laws` takes (subjects.py). Items are called `dovetail::py:package.models:tiny::causal`; `-k`
selects them like any other test. A law that does not apply is skipped, with the reason. Without the option nothing is
imported, torch included.
"""

from __future__ import annotations

import functools
import shlex
from collections.abc import Iterator
from typing import Any

import pytest

from dovetail.proof.laws.law import Broken


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option `--dovetail` and the ini setting `dovetail`."""
    text = "test this side, one item per law: py:package.module:factory, py:file.py:factory, hf:DIR (may be repeated)"
    parser.getgroup("dovetail").addoption("--dovetail", action="append", default=[], metavar="SIDE", help=text)
    parser.addini("dovetail", "sides to test in every run, named as for --dovetail", type="linelist", default=[])


class Unopened(Exception):
    """A side cannot be opened: no such file, an error in the factory."""


class LawItem(pytest.Item):
    """One law on one side."""

    def __init__(self, *, law: str, says: str, **more: Any) -> None:
        super().__init__(name=law, **more)
        self.law, self.says = law, says

    def runtest(self) -> None:
        """Test the law; skip it where it does not apply."""
        from dovetail.base.errors import DovetailError

        try:
            side = _opened(self.side)
        except DovetailError as error:
            raise Unopened(str(error)) from None
        result = side.test(self.law)
        if result.state == "not applicable":
            pytest.skip(result.detail)
        if result.state == "failed":
            raise Broken(result.detail)

    @property
    def side(self) -> str:
        """The side's name."""
        assert self.parent is not None
        return self.parent.name

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The law and what breaks it, for a law that does not hold, since no line of the user's code failed; the traceback of
        anything else."""
        if isinstance(excinfo.value, Broken):
            again = f"dovetail laws {shlex.quote(self.side)} --only {self.law}"
            return f"{self.side}: the law {self.law} does not hold: {excinfo.value}\n({self.says}; again: {again})"
        if isinstance(excinfo.value, Unopened):
            return f"{self.side}: cannot be opened: {excinfo.value}"
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        """The name of the item in a report."""
        return self.path, None, f"dovetail::{self.side}::{self.law}"


class SideLaws(pytest.Collector):
    """All laws on one side."""

    def collect(self) -> Iterator[LawItem]:
        """Yield one item per law."""
        from dovetail.proof.subjects import kind_of

        kind = kind_of(self.name)
        for law in kind.laws.names():
            yield LawItem.from_parent(self, law=law, says=kind.statements[law])


@functools.cache
def _opened(name: str) -> Any:
    """The side, opened once for all its laws."""
    from dovetail.proof.subjects import kind_of

    return kind_of(name).open(name)


@pytest.hookimpl(tryfirst=True)  # before `-k` deselects
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add the items of every side."""
    for name in dict.fromkeys([*config.getini("dovetail"), *(config.getoption("--dovetail") or [])]):
        parent = SideLaws.from_parent(session, name=name, nodeid=f"dovetail::{name}")
        report = config.hook.pytest_make_collect_report(collector=parent)
        config.hook.pytest_collectreport(report=report)  # counted as collected
        items.extend(report.result)
