"""A trained model and servers of it, for all tests of the folder."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
from http_server import KEY, OTHER, Served, serving, train_small

from dovetail.serving.http.options import Options


@pytest.fixture(scope="session")
def trained():
    return train_small()


@pytest.fixture(scope="session")
def served(trained) -> Iterator[Served]:
    """An open server without keys, for all tests that change nothing."""
    with serving(trained) as one:
        yield one


@pytest.fixture(scope="session")
def keyed(trained) -> Iterator[Served]:
    with serving(trained, options=Options(models={"tiny": None}, keys=(KEY, OTHER), version="test")) as one:
        yield one


@pytest.fixture
def start(trained) -> Iterator[Callable[..., Served]]:
    """Start servers of a test's own."""
    with contextlib.ExitStack() as stack:
        yield lambda **how: stack.enter_context(serving(trained, **how))
