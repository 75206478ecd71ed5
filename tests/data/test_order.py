"""The order of samples: permutations, and a choice of sources with exact weights over every prefix."""

from __future__ import annotations

import numpy as np
import pytest

from dovetail.base.errors import UsageError
from dovetail.data.stream import GOLDEN, MODULUS, Permutation, SourceChoice, floor_sum


@pytest.mark.parametrize("size", [*range(1, 70), 255, 256, 257, 1000, 4097, 100_003])
def test_it_is_a_permutation(size: int) -> None:
    image = Permutation(size, "seed 3")(np.arange(size))
    assert np.array_equal(np.sort(image), np.arange(size))


def test_it_depends_on_its_key_alone() -> None:
    one, again, other = (Permutation(10_007, key)(np.arange(10_007)) for key in ("0 0 a", "0 0 a", "0 1 a"))
    assert np.array_equal(one, again)
    assert (one == other).sum() < 20
    pieces = [Permutation(10_007, "0 0 a")(np.arange(i, min(i + 13, 10_007))) for i in range(0, 10_007, 13)]
    assert np.array_equal(np.concatenate(pieces), one)


@pytest.mark.parametrize("size", [1000, 100_003])
def test_it_looks_random(size: int) -> None:
    """Pairs of neighbors, fixed points and halves are as frequent as in a random permutation."""
    images = np.stack([Permutation(size, f"{key} 0 corpus")(np.arange(size)) for key in range(20)])
    neighbors = (np.diff(images, axis=1) == 1).sum(1)
    assert 0.3 < neighbors.mean() < 2.2  # Poisson with mean 1
    assert (images == np.arange(size)).sum(1).mean() < 2.2
    lower = (images[:, : size // 2] < size // 2).mean()
    assert abs(lower - 0.5) < 0.01
    correlation = np.corrcoef(images[0], np.arange(size))[0, 1]
    assert abs(correlation) < 0.1
    assert all(abs(np.corrcoef(one[:-1], one[1:])[0, 1]) < 0.15 for one in images)


def test_an_index_outside_is_an_error() -> None:
    for index in (-1, 5):
        with pytest.raises(IndexError):
            Permutation(5, "key")(np.array([index]))


# -- mixtures


def test_the_sum_of_floors_by_hand() -> None:
    rng = np.random.default_rng(0)
    for n, m, a, b in rng.integers(1, 60, (300, 4)).tolist():
        assert floor_sum(n, m, a, b) == sum((a * i + b) // m for i in range(n))
    assert floor_sum(0, 5, 3, 2) == 0


WEIGHTS = [[1.0], [0.5, 0.5], [0.7, 0.2, 0.1], [3, 1, 4, 1, 5], [0.999, 0.001], [1e-6, 1.0], [np.pi, np.e]]


@pytest.mark.parametrize("weights", WEIGHTS, ids=map(str, WEIGHTS))
def test_every_prefix_has_the_weights(weights: list[float]) -> None:
    choice, count = SourceChoice(weights), 50_000
    source, number = choice(0, count)
    for which, weight in enumerate(weights):
        so_far = np.cumsum(source == which)
        expected = np.arange(1, count + 1) * (weight / sum(weights))
        assert np.abs(so_far - expected).max() < 4
        assert np.array_equal(number[source == which], np.arange((source == which).sum()))
        for n in (0, 1, 2, 777, count):
            assert choice.before(n, which) == (source[:n] == which).sum()


def test_far_samples_need_no_earlier_ones() -> None:
    choice = SourceChoice([0.7, 0.2, 0.1])
    whole, numbers = choice(0, 3000)
    for first, count in ((0, 1), (999, 17), (2990, 10)):
        source, number = choice(first, count)
        assert np.array_equal(source, whole[first : first + count])
        assert np.array_equal(number, numbers[first : first + count])
    far = 10**15
    assert sum(choice.before(far, which) for which in range(3)) == far
    assert [abs(choice.before(far, which) - far * w) < 40 for which, w in enumerate((0.7, 0.2, 0.1))] == [True] * 3
    assert choice(far, 4)[1].max() < far
    assert (GOLDEN % 2, MODULUS) == (1, 2**64)


def test_weights_that_cannot_be_right() -> None:
    for weights in ([], [1.0, 0.0], [1.0, -1.0], [float("nan")], [float("inf"), 1.0]):
        with pytest.raises(UsageError, match="weights"):
            SourceChoice(weights)
