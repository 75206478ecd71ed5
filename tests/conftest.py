from collections import Counter
from collections.abc import Iterator

import pytest

from dovetail.parallel.pair import Pair


@pytest.fixture(scope="session")
def pair() -> Iterator[Pair]:
    """Two ranks for all tests: starting them is what takes time."""
    with Pair() as ranks:
        yield ranks


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`@pytest.mark.quick(n)`: of a parametrized test, the first n cases are in the quick run; the others are slow."""
    cases: Counter[str] = Counter()
    for item in items:
        if (marker := item.get_closest_marker("quick")) is not None:
            function = item.nodeid.partition("[")[0]
            cases[function] += 1
            if cases[function] > marker.args[0]:
                item.add_marker(pytest.mark.slow)
