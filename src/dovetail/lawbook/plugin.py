"""The pytest plugin: laws on the models of a user's own repository, one test item per law.

    pytest --dovetail py:model.py:tiny --dovetail hf:checkpoint        adds these items to the collected tests
    [tool.pytest.ini_options]
    dovetail = ["py:model.py:tiny"]                                    the same, in every run

Items are called `dovetail::py:model.py:tiny::causal`; `-k` selects them like any other test. A law that does not apply to a
model is skipped, with the reason. Without the option nothing is imported, torch included.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option `--dovetail` and the ini setting `dovetail`."""
    text = "test a model with the laws that need no spec: py:file.py:factory or hf:DIR (may be given several times)"
    parser.getgroup("dovetail").addoption("--dovetail", action="append", default=[], metavar="MODEL", help=text)
    parser.addini("dovetail", "models to test in every run, named as for --dovetail", type="linelist", default=[])


class Broken(Exception):
    """A law does not hold. Reported without a traceback, since no line of the user's code failed."""


class LawItem(pytest.Item):
    """One law on one model."""

    def __init__(self, *, law: str, **more: Any) -> None:
        super().__init__(name=law, **more)
        self.law = law

    def runtest(self) -> None:
        """Test the law; skip it where it does not apply."""
        from dovetail.lawbook.foreign.laws import try_law

        result = try_law(_opened(self.model), self.law)
        if result.state == "not applicable":
            pytest.skip(result.detail)
        if result.state == "failed":
            raise Broken(result.detail)

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
        """The name of the item in a report."""
        return self.path, None, f"dovetail::{self.model}::{self.law}"


class ModelLaws(pytest.Collector):
    """All laws on one model."""

    def collect(self) -> Iterator[LawItem]:
        """Yield one item per law."""
        from dovetail.lawbook.foreign.laws import law_names

        for law in law_names():
            yield LawItem.from_parent(self, law=law)


@functools.cache
def _opened(model: str) -> Any:
    """The model, opened once for all its laws."""
    from dovetail.lawbook.foreign.opening import opened

    return opened(model)


@pytest.hookimpl(tryfirst=True)  # before `-k` deselects
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add the items of every model."""
    for model in dict.fromkeys([*config.getini("dovetail"), *(config.getoption("--dovetail") or [])]):
        parent = ModelLaws.from_parent(session, name=model, nodeid=f"dovetail::{model}")
        report = config.hook.pytest_make_collect_report(collector=parent)
        config.hook.pytest_collectreport(report=report)  # counted as collected
        items.extend(report.result)
