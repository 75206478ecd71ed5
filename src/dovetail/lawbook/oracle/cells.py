"""Oracles of recurrent cells: the outputs of torch.nn.RNN, LSTM and GRU with the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dovetail.lawbook.oracle.registry import Comparison, oracle
from dovetail.lawbook.oracle.stand import alone, ctx, eye, numbers, part

FOUR = [[[1.0], [-2.0], [0.5], [0.0]]]  # four tokens of one channel
THREE = [[[1.0], [-1.0], [2.0]]]
BY_GATE = [[0.5], [-0.5], [1.0], [0.25], [2.0], [-1.0], [0.75], [0.1]]  # two channels of state, gate by gate
RECURRENT = [[0.1, 0.0], [0.2, -0.2], [0.3, -0.4], [0.4, 0.0], [0.5, -0.2], [0.6, -0.4], [0.7, 0.0], [0.8, -0.2]]


def small(kind: str, weight: Any, u: Any, bias: Any, **more: Any) -> Any:
    """The states of a cell with one channel."""
    given = {"x.weight": weight, "x.bias": bias, "u": [u], "o.weight": [[1.0]], **more}
    return alone(part(kind, inner=1), given, embed=1)(numbers(FOUR), ctx(4)).flatten()


def two(kind: str, gates: int) -> Any:
    """The states of a cell with two channels and no bias."""
    given = {"x.weight": BY_GATE[: 2 * gates], "u": [RECURRENT[: 2 * gates]], "o.weight": eye(2)[:1]}
    first = alone(part(kind, inner=2, bias=False), given, embed=1)(numbers(THREE), ctx(3))
    given["o.weight"] = eye(2)[1:]
    second = alone(part(kind, inner=2, bias=False), given, embed=1)(numbers(THREE), ctx(3))
    return [[a, b] for a, b in zip(first.flatten().tolist(), second.flatten().tolist(), strict=True)]


@oracle("rnn")
def rnn() -> Iterator[Comparison]:
    """tanh(0.5 x − 0.8 h + 0.3); and two channels that mix: the first token gives tanh(−1.5), tanh(2.5)."""
    want = [0.664036770268, -0.842935561028, 0.840932210443, -0.356391070080]
    yield Comparison("four tokens", small("rnn", [[0.5]], [[-0.8]], [0.3]), want)
    given = {"x.weight": [[0.5, -1.0], [2.0, 0.25]], "u": [[[0.0, 1.0], [-0.5, 0.3]]], "o.weight": eye(2)}
    module = alone(part("rnn", inner=2, bias=False), given, embed=2)
    y = module(numbers([[[1.0, 2.0], [0.0, -1.0], [0.5, 0.5]]]), ctx(3))
    want = [[-0.905148253645, 0.986614298151], [0.963069563999, 0.460982672016], [0.207906887301, 0.653715751168]]
    yield Comparison("two channels of state", y[0], want)
    # two heads, each with its own 1 × 1 matrix
    given = {"x.weight": [[0.5], [0.5]], "x.bias": [0.3, 0.3], "u": [[[-0.8]], [[0.0]]], "o.weight": [[1.0, 10.0]]}
    y = alone(part("rnn", inner=2, heads=2), given, embed=1)(numbers(FOUR), ctx(4)).flatten()
    # 0.664036770268 + 10 tanh(0.8), −0.842935561028 + 10 tanh(−0.7)
    yield Comparison("two heads", y[:2], [7.304404472945, -6.886613332198])


@oracle("lstm")
def lstm() -> Iterator[Comparison]:
    """Gates in the order input, forget, cell, output."""
    weight, u, bias = [[0.5], [-0.4], [0.9], [0.3]], [[0.2], [0.7], [-0.6], [1.1]], [0.1, 0.2, -0.3, 0.4]
    want = [0.222833696088, -0.014202983895, 0.049260217084, -0.075502304866]
    yield Comparison("four tokens", small("lstm", weight, u, bias), want)
    want = [[0.364785470722, -0.146921932385], [-0.068612882066, 0.218808406483], [0.417584574154, 0.003217109481]]
    yield Comparison("two channels of state", two("lstm", 4), want)
    spec = part("lstm", inner=2)
    scope = spec.axes(alone(part("rmsnorm"), {"scale": [1.0]}, embed=1).scope)
    yield Comparison("the forget gate starts at 1", spec.constant("x.bias", scope), [0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0])


@oracle("gru")
def gru() -> Iterator[Comparison]:
    """Gates in the order reset, update, new; the new gate's second bias, 0.4, is scaled by reset."""
    weight, u, bias = [[0.5], [-0.4], [0.9]], [[0.2], [0.7], [-0.6]], [0.1, 0.2, -0.3]
    want = [0.382333336514, 0.085877162961, 0.209882564038, 0.059989386774]
    yield Comparison("four tokens", small("gru", weight, u, bias, held_bias=[0.4]), want)
    want = [[0.259266947625, -0.333443818265], [-0.577911882733, 0.290693315994], [-0.336473673188, -0.255859966159]]
    yield Comparison("two channels of state", two("gru", 3), want)
