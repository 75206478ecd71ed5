"""The byte models that the corpus benchmark compares with."""

import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from ngram import NGram, xz_bits

TEXT = b"the cat sat on the mat, the dog sat on the log. " * 4


@pytest.mark.parametrize("context", [b"", b"t", b"the ", b"on the ", b"xyz", b"q the "])
def test_probabilities_add_up_to_1(context: bytes) -> None:
    model = NGram(TEXT, order=5)
    assert sum(model.probability(context, byte) for byte in range(256)) == pytest.approx(1)


def test_the_recurrence_by_hand() -> None:
    model = NGram(b"abac", order=2)
    unigram = (2 + 3 / 256) / (4 + 3)  # a: 2 of 4, 3 distinct bytes
    assert model.probability(b"", ord("a")) == pytest.approx(unigram)
    assert model.probability(b"b", ord("a")) == pytest.approx((1 + unigram) / (1 + 1))
    assert NGram(b"abac", order=2).bits(b"a") == pytest.approx(-math.log2(unigram))


def test_a_longer_context_predicts_a_periodic_text_better() -> None:
    bits = [NGram(TEXT, order).bits(TEXT) for order in (1, 2, 6)]
    assert bits[0] > bits[1] > bits[2]
    assert bits[2] < 0.6


def test_xz_behind_a_text_that_repeats_needs_less() -> None:
    alone, behind = xz_bits(TEXT * 20, TEXT)
    assert behind < alone / 4
