"""Oracles of blocks whose branches run side by side, with the token, mixer, ffn and norms of `wire.py`.

second mixer: half of the first, f′(x) = (x₂, x₁)          experts: an ffn h(x) = x
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Iterator

from checks.oracles.wire import another_block, attention, mlp, through
from dovetail.proof.laws.oracle import Comparison, eye, oracle, part

SECOND = {"ssm.q.weight": eye(2), "ssm.k.weight": eye(2), "ssm.v.weight": eye(2), "ssm.o.weight": [[0.0, 1.0], [1.0, 0.0]]}
DENSE = {"experts.up.weight": eye(2), "experts.down.weight": eye(2)}
NORMS = ("mixer_norm", "ffn_norm")


@oracle("hybrid_block")
def hybrid_block() -> Iterator[Comparison]:
    """(1, 7) + (2.8, 0.4) + (1.4, 0.2) = (5.2, 7.6), of root mean square √42.4 = 6.5115282; + 3·(0.79858365, 2·1.16716071)."""
    fields = {"ssm": attention(), "wire": part("pre_norm")}
    block = another_block("hybrid_block", fields, NORMS, SECOND)
    yield Comparison("both mixers read the same", through(block), [7.59575094, 14.60296429])
    # norm(2.8, 0.4) = norm(1.4, 0.2) = (1.4, 0.2); by (2, 1) and (1, 1): (1, 7) + (2.8, 0.2) + (1.4, 0.2) = (5.2, 7.4)
    norms = ("mixer_norm", "mixer_post_norm", "ffn_norm", "ffn_post_norm")
    own = {"ssm_norm.scale": [1.0, 1.0], "ssm_post_norm.scale": [1.0, 1.0]}
    block = another_block("hybrid_block", {**fields, "wire": part("sandwich_norm")}, norms, {**SECOND, **own})
    # √40.9 = 6.3953108; norm(3·(0.81309574, 2·1.15709779)) = (0.46879199, 1.33425413), by (1, 3)
    yield Comparison("two norms for each", through(block), [5.66879199, 11.40276238])
    # 2·(2.8, 0.4)/4 = (1.4, 0.2); of half the norm, (0.1, 0.7), gated: 4·(0.7·σ(0.7), 0.1·σ(0.1)) = (1.87092576, 0.20999168);
    # (1, 7) with both is (4.27092576, 7.40999168), of root mean square 6.0476766; + 2·3·(0.70620936, 2·1.22526256)
    factors = {"mixer_in": 2.0, "mixer_out": 0.25, "ssm_in": 0.5, "ssm_out": 4.0, "ffn_out": 2.0}
    gated = {**fields, "ssm": dc.replace(attention(), gate=True), **factors}
    block = another_block("hybrid_block", gated, NORMS, {**SECOND, "ssm.gate.weight": eye(2)})
    yield Comparison("factors before and behind each branch", through(block), [8.50818189, 22.11314242])


@oracle("expert_block")
def expert_block() -> Iterator[Comparison]:
    """(1, 7) + (2.8, 0.4) = (3.8, 7.4); its norm, (0.64601935, 2·1.25803768), is added three times and once more."""
    fields = {"experts": mlp(), "wire": part("pre_norm")}
    yield Comparison(
        "both read the same", through(another_block("expert_block", fields, NORMS, DENSE)), [6.38407753, 17.46430193]
    )
    block = another_block("expert_block", {**fields, "wire": part("parallel")}, ("norm",), DENSE)
    yield Comparison("beside the mixer", through(block), [4.6, 13.0])  # (1, 7) + (2.8, 0.4) + 4·(0.2, 1.4)
