"""Oracles of recurrent cells: the outputs of torch.nn.RNN, LSTM and GRU with the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout
from dovetail.proof.laws.oracle import Comparison, alone, ctx, eye, numbers, oracle, part

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
    # from an encoder output of 2 tanh(0.25·2 − 0.1) = 0.379948962255 is the state before the first; from −1 −0.336375544336
    given = {"x.weight": [[0.5]], "x.bias": [0.3], "u": [[[-0.8]]], "h_start.weight": [[0.25]], "h_start.bias": [-0.1]}
    y = started("rnn", given, TokenLayout.packed([[2, 2]], 4), TokenLayout.packed([[2, 1]], 4))
    want = [0.458997786240, -0.788403313774, 0.674579961882, -0.235178329600]
    yield Comparison("two documents, each from the last token of its source", y, want)
    y = started("rnn", given, TokenLayout.whole(1, 4), TokenLayout.padded([3], 4))
    yield Comparison("from the last token that is no padding", y[0], 0.789122068371)
    # two heads, each with its own 1 × 1 matrix
    given = {"x.weight": [[0.5], [0.5]], "x.bias": [0.3, 0.3], "u": [[[-0.8]], [[0.0]]], "o.weight": [[1.0, 10.0]]}
    y = alone(part("rnn", inner=2, heads=2), given, embed=1)(numbers(FOUR), ctx(4)).flatten()
    # 0.664036770268 + 10 tanh(0.8), −0.842935561028 + 10 tanh(−0.7)
    yield Comparison("two heads", y[:2], [7.304404472945, -6.886613332198])


def started(kind: str, given: dict[str, Any], tokens: TokenLayout, sources: TokenLayout) -> Any:
    """The states of a cell of one channel that starts from the encoder output."""
    module = alone(part(kind, inner=1, from_encoder=True), {**given, "o.weight": [[1.0]]}, embed=1, encoder=1)
    encoded = numbers([[[7.0], [2.0], [-1.0], [9.0]]])
    return module(numbers(FOUR), Ctx(layout=tokens, encoder_output=encoded, encoder_layout=sources)).flatten()


@oracle("lstm")
def lstm() -> Iterator[Comparison]:
    """Gates in the order input, forget, cell, output."""
    weight, u, bias = [[0.5], [-0.4], [0.9], [0.3]], [[0.2], [0.7], [-0.6], [1.1]], [0.1, 0.2, -0.3, 0.4]
    want = [0.222833696088, -0.014202983895, 0.049260217084, -0.075502304866]
    yield Comparison("four tokens", small("lstm", weight, u, bias), want)
    want = [[0.364785470722, -0.146921932385], [-0.068612882066, 0.218808406483], [0.417584574154, 0.003217109481]]
    yield Comparison("two channels of state", two("lstm", 4), want)
    gates = {"x.weight": weight, "x.bias": bias, "u": [u], "h_start.weight": [[0.25]], "h_start.bias": [-0.1]}
    given = {**gates, "c_start.weight": [[-0.5]], "c_start.bias": [0.2]}
    y = started("lstm", given, TokenLayout.whole(1, 4), TokenLayout.padded([2], 4))
    # from the encoder output 2: h = tanh(0.4), c = tanh(−0.8)
    yield Comparison("both states start from the encoder output", y[0], -0.080439647139)
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


@oracle("reverse")
def reverse() -> Iterator[Comparison]:
    """The RNN of the oracle above, from the last token to the first; two documents of two tokens, each by itself."""
    given = {"mixer.x.weight": [[0.5]], "mixer.x.bias": [0.3], "mixer.u": [[[-0.8]]], "mixer.o.weight": [[1.0]]}
    module = alone(part("reverse", mixer=part("rnn", inner=1)), given, embed=1)
    backward = numbers(FOUR).flip(1)
    want = [-0.356391070080, 0.840932210443, -0.842935561028, 0.664036770268]
    yield Comparison("four tokens", module(backward, ctx(4)).flatten(), want)
    y = module(numbers([[[-2.0], [1.0], [-2.0], [1.0]]]), Ctx(layout=TokenLayout.packed([[2, 2]], 4))).flatten()
    yield Comparison("two documents", y, [-0.842935561028, 0.664036770268] * 2)
    y = module(numbers([[[-2.0], [1.0], [5.0], [5.0]]]), Ctx(layout=TokenLayout.padded([2], 4))).flatten()
    yield Comparison("padding behind the tokens", y[:2], [-0.842935561028, 0.664036770268])
    yield Comparison("it has no decode state", len(module.mixer.part.state(module.mixer.scope)), 0, near=0)
