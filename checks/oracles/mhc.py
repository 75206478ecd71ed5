"""The oracle of hyper-connections: a block on one token with the two streams (1, 7) and (2, 2), by hand.

    mixer f(x) = 2·(x₂, x₁)     ffn g(x) = 3·x     M = 0, so that all coefficients are those of `base`

One iteration normalizes columns alone: softmax of (0, ln 2) and (0, 0) is ⅓ ⅔ ½ ½, over the sums 5/6 and 7/6 of its columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import log
from typing import Any

from checks.oracles.wire import block_with
from dovetail.nn.ctx import Ctx
from dovetail.proof.laws.oracle import Comparison, numbers, oracle, part, row

HALF, MORE = 0.0, log(3)  # σ is ½ and ¾
# logits of what is read, of what is written (twice σ: 1 and ½), and of the mixture of streams
MIXER = [HALF, MORE, HALF, -MORE, 0.0, log(2), 0.0, 0.0]
FFN = [MORE, HALF, -MORE, HALF, 0.0, 0.0, log(2), 0.0]
STREAMS = [[[[1.0, 7.0], [2.0, 2.0]]]]
NOTHING = [[0.0] * 4 for _ in range(8)]


def _streams(iterations: int = 1, mix: Any = NOTHING) -> Any:
    wire = part("mhc", count=2, iterations=iterations, eps=1e-30, norm_eps=1e-30)
    weights = {
        "wire.base": [MIXER, FFN],
        "wire.factor": [[2.0, 3.0, 5.0]] * 2,
        "wire.mix0.weight": mix,
        "wire.mix1.weight": NOTHING,
    }
    return block_with(wire, ("mixer_norm", "ffn_norm"), **weights)


@oracle("mhc")
def mhc() -> Iterator[Comparison]:
    """The mixer reads ½·(1, 7) + ¾·(2, 2) = (2, 5); f of its norm is (2.62612866, 1.05045146). It is added to 0.4·(1, 7) +
    0.6·(2, 2), and half of it to 4/7·(1, 7) + 3/7·(2, 2). Then the ffn, with the streams the other way round."""
    block, streams, ctx = _streams(), numbers(STREAMS), Ctx(layout=row(1))
    want = [[4.59526163, 8.71454014], [6.06716075, 12.13206182]]
    yield Comparison("both branches", block(streams, ctx, {})[0, 0], want)
    pre, post, mixing = (x[0, 0] for x in block.wire.coefficients(streams, 0, ctx))
    yield Comparison("what a branch reads, as logits", pre, [HALF, MORE])
    yield Comparison("how much it writes to each stream", post, [1.0, 0.5])
    yield Comparison("from stream to stream", mixing, [[0.4, 4 / 7], [0.6, 3 / 7]])
    two = _streams(iterations=2).wire.coefficients(streams, 0, ctx)[2][0, 0]  # rows over 34/35 and 36/35, columns again
    yield Comparison("two iterations", two, [[12 / 29, 24 / 41], [17 / 29, 17 / 41]])
    # u = (1, 7, 2, 2) / √14.5; the first coefficient reads its second channel, by a factor of 2
    first = [[0.0, 1.0, 0.0, 0.0], *NOTHING[1:]]
    pre = _streams(mix=first).wire.coefficients(streams, 0, ctx)[0][0, 0]
    yield Comparison("coefficients that depend on the token", pre, [3.67658012, MORE])
    yield Comparison("open", block.wire.open(numbers([[[1.0, 7.0]]]))[0, 0], [[1.0, 7.0], [1.0, 7.0]])
