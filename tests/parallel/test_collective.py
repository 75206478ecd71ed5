"""Each sum and join over ranks, and its gradient, by hand: x = (r + 1)·[1, 2], gradient (r + 1)·[1, 2, …]."""

import pytest
from rank_jobs import gradients_of

from dovetail.parallel.pair import Pair


@pytest.mark.parametrize(
    ("name", "outs", "gradients"),
    [
        ("enter", ([1, 2], [2, 4]), ([3, 6], [3, 6])),
        ("leave", ([3, 6], [3, 6]), ([1, 2], [2, 4])),
        ("total", ([3, 6], [3, 6]), ([3, 6], [3, 6])),
        ("gather", ([1, 2, 2, 4], [1, 2, 2, 4]), ([3, 6], [9, 12])),
    ],
)
def test_forward_and_backward(pair: Pair, name: str, outs: tuple[list[float]], gradients: tuple[list[float]]) -> None:
    for rank, (out, gradient) in enumerate(pair.run(gradients_of, name)):
        assert out == outs[rank]
        assert gradient == gradients[rank]
