"""The pytest plugin: laws on models of a user's own repository, one test item per law.

    pytest --dovetail py:model.py:tiny --dovetail hf:checkpoint        beside whatever else is collected
    [tool.pytest.ini_options]
    dovetail = ["py:model.py:tiny"]                                    the same, at every run

Items are called `dovetail::py:model.py:tiny::causal`, and chosen by `-k` as others are. A law that a model has no means for is
skipped, with the reason. Without the option nothing is imported: torch least of all.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option, and the line in a project's settings."""
    says = "hold a model to the laws that need no declarations: py:file.py:factory or hf:DIR (may be given several times)"
    parser.getgroup("dovetail").addoption("--dovetail", action="append", default=[], metavar="MODEL", help=says)
    parser.addini("dovetail", "models held to the laws at every run, as --dovetail names them", type="linelist", default=[])


class Broken(Exception):
    """A law does not hold; told without a traceback, since no line of the user's test failed."""


class LawItem(pytest.Item):
    """One law on one model."""

    def __init__(self, *, law: str, **more: Any) -> None:
        super().__init__(name=law, **more)
        self.law = law

    def runtest(self) -> None:
        """Try it."""
        from dovetail.lawbook.foreign.laws import try_law

        found = try_law(_opened(self.model), self.law)
        if found.state == "not applicable":
            pytest.skip(found.detail)
        if found.state == "failed":
            raise Broken(found.detail)

    @property
    def model(self) -> str:
        """The model's name."""
        assert self.parent is not None
        return self.parent.name

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """One line for a law that does not hold; the traceback of anything else."""
        if isinstance(excinfo.value, Broken):
            return f"{self.model}: the law {self.law} does not hold: {excinfo.value}"
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        """How a report calls it."""
        return self.path, None, f"dovetail::{self.model}::{self.law}"


class ModelLaws(pytest.Collector):
    """All laws on one model."""

    def collect(self) -> Iterator[LawItem]:
        """An item for each."""
        from dovetail.lawbook.foreign.laws import told_names

        for law in told_names():
            yield LawItem.from_parent(self, law=law)


@functools.cache
def _opened(model: str) -> Any:
    """The model, made once for all its laws."""
    from dovetail.lawbook.foreign.opening import opened

    return opened(model)


@pytest.hookimpl(tryfirst=True)  # before `-k` chooses
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add the laws of every model that was named."""
    for model in dict.fromkeys([*config.getini("dovetail"), *(config.getoption("--dovetail") or [])]):
        parent = ModelLaws.from_parent(session, name=model, nodeid=f"dovetail::{model}")
        report = config.hook.pytest_make_collect_report(collector=parent)
        config.hook.pytest_collectreport(report=report)  # counted as collected
        items.extend(report.result)
