"""Which attention kernel runs on which device."""

from __future__ import annotations

from itertools import chain, combinations

import pytest

from dovetail.ops.attend import BACKENDS, choose
from dovetail.ops.implementation import ProblemSize

FEATURES = sorted(set().union(*(backend.offers for backend in BACKENDS)))
NEEDS = [frozenset(chosen) for chosen in chain.from_iterable(combinations(FEATURES, n) for n in range(len(FEATURES) + 1))]


@pytest.mark.parametrize("tokens", [1, 64, 4096, 65536])
@pytest.mark.parametrize("plain", [True, False])
def test_no_gpu_loops_over_tiles(tokens: int, plain: bool) -> None:
    for queries in {1, tokens}:
        for touched in (queries * tokens, queries * min(tokens, 256)):
            shape = ProblemSize(2, queries, tokens, 8, 64, plain, touched)
            assert {choose(needs, shape, "cuda").name for needs in NEEDS} <= {"torch", "flex", "reference"}


def test_a_cpu_does_where_a_window_leaves_most_tiles_out() -> None:
    assert choose(frozenset({"softcap"}), ProblemSize(2, 4096, 4096, 8, 64, False, 4096 * 256), "cpu").name == "tiled"
