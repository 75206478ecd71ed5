from collections.abc import Iterator

import pytest

from dovetail.parallel.pair import Pair


@pytest.fixture(scope="session")
def pair() -> Iterator[Pair]:
    """Two ranks for all tests: starting them is what takes time."""
    with Pair() as ranks:
        yield ranks
