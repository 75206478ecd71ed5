"""Every family that holds a language model: random tiny ones made by transformers, and ours with the same weights."""

from __future__ import annotations

import pytest
from draws import FIRST, Draw
from draws_more import MORE
from hf_pair import Pair, check_gradients, check_greedy, check_logits, check_there_and_back

FAMILIES = {**FIRST, **MORE}
QUICK, ALL = 1, 20  # random configs of each family
CASES = [
    pytest.param(family, seed, marks=[pytest.mark.slow] if seed >= QUICK else [], id=f"{family}-{seed}")
    for family in FAMILIES
    for seed in range(ALL)
]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("family", "seed"), CASES)
def test_ours_is_theirs(family: str, seed: int) -> None:
    """Logits with left padding, there and back by files, 64 greedy tokens with a cache, and at last gradients."""
    fields = FAMILIES[family](Draw(f"{family} {seed}"))
    pair = Pair(family, fields, seed)
    leaks = pair.biased_convolution()
    check_logits(pair, [17, 17] if leaks else [17, 9, 1])
    check_there_and_back(pair)
    for lengths in ([9], [4]) if pair.decodes_one_row() else ([9, 9] if leaks else [9, 4, 6],):
        check_greedy(pair, lengths, new=64)
    check_gradients(pair, 15)
