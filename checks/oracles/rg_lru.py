"""Oracles of rg_lru: a state that halves at every token."""

from __future__ import annotations

from collections.abc import Iterator

from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout
from dovetail.proof.laws.oracle import Comparison, alone, ctx, numbers, oracle, part

HALVES = -1.6649130173488094  # ln(e^{ln 2 / 4} − 1): with a gate r of 1/2, a = e^{−8 · ½ · softplus} = ½
ONE = 1.144630309022782  # the tanh form of gelu of this is 1
BIASED = {"x.bias": [0.0], "y.bias": [ONE], "o.bias": [0.0], "conv_bias": [0.0], "r_bias": [[0.0]], "i_bias": [[0.0]]}


@oracle("rg_lru")
def halving() -> Iterator[Comparison]:
    """Gates of 1/2, a decay of 1/2, an output gate of 1, inputs 1, 2, 3. The first token adds ½ · 1, later ones √¾ · ½ · x."""
    zero, one = [[0.0]], [[1.0]]
    weights = {"x.weight": one, "y.weight": zero, "o.weight": one, "conv": [[0.0, 1.0]], "r": [zero], "i": [zero]}
    mixer = alone(part("rg_lru", heads=1, conv_size=2), {**weights, **BIASED, "decay": [[HALVES]]}, embed=1)
    tokens = numbers([[[1.0], [2.0], [3.0]]])
    yield Comparison("three tokens", mixer(tokens, ctx(3))[0, :, 0], [0.5, 1.1160254037844386, 1.8570508075688772])
    packed = Ctx(layout=TokenLayout.packed([[1, 2]], 3))
    yield Comparison("a document begins at the second", mixer(tokens, packed)[0, :, 0], [0.5, 1.0, 1.799038105676658])


@oracle("rg_lru")
def gates() -> Iterator[Comparison]:
    """Two channels, of which the first reads the second through its input gate: σ(1) and σ(0) of the input (2, 1)."""
    eye, zeros = [[1.0, 0.0], [0.0, 1.0]], [[0.0, 0.0], [0.0, 0.0]]
    weights = {"x.weight": eye, "y.weight": zeros, "o.weight": eye, "conv": [[0.0, 1.0]] * 2}
    blocks = {"r": [zeros], "i": [[[0.0, 1.0], [0.0, 0.0]]], "decay": [[HALVES] * 2]}
    biases = {name: [values * 2] if name in ("r_bias", "i_bias") else values * 2 for name, values in BIASED.items()}
    biases |= {name: [[0.0, 0.0]] for name in ("r_bias", "i_bias")}
    mixer = alone(part("rg_lru", heads=1, conv_size=2), {**weights, **blocks, **biases}, embed=2)
    yield Comparison("the first token", mixer(numbers([[[2.0, 1.0]]]), ctx(1))[0, 0], [1.4621171572600098, 0.5])
