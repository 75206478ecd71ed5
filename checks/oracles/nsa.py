"""Oracles of native sparse attention, computed by hand: eight tokens in four blocks of two, one head of one channel.

    keys 0, 0 | 1, 0 | 0, 2 | 0, 1          values 1, 2 | 3, 4 | 5, 6 | 7, 8          every query is 1

A block's key is ½·silu((k₁ + 1) + 2·k₂), of 1, 2, 5, 3: 0.36552929, 0.88079708, 2.48326787, 1.42886119. Its value is
silu((v₁ + v₂)/10), of 0.3, 0.7, 1.1, 1.5: 0.17233276, 0.46773144, 0.82528612, 1.22636171.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dovetail.nn.ctx import Ctx, Listener
from dovetail.nn.layout import TokenLayout
from dovetail.ops.attend import using
from dovetail.proof.laws.oracle import Comparison, alone, numbers, oracle, part, row
from dovetail.spec.scope import Scope

KEYS, VALUES = [0.0, 0.0, 1.0, 0.0, 0.0, 2.0, 0.0, 1.0], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
TOKENS = [[1.0, key, value, 1.0] for key, value in zip(KEYS, VALUES, strict=True)]  # the query is 1; the last channel is 1
OPEN, SHUT = 100.0, -100.0


def _sparse(gates: list[float], heads: int = 1) -> Any:
    """One gate per branch: open, shut, or 0 for ½; the query of a second head is −1."""
    spec = part("nsa", heads=heads, kv_heads=1, head=1, block=2, top=1, window=3, position=part("none"))
    mapped = {"k_place": [1.0, 0.0], "k_in": [[1.0, 2.0]], "k_out": [[0.5]]}
    mapped |= {"v_place": [0.0, 0.0], "v_in": [[0.1, 0.1]], "v_out": [[1.0]]}
    weights = {
        "q.weight": [[1.0, 0.0, 0.0, 0.0], [-1.0, 0.0, 0.0, 0.0]][:heads],
        "k.weight": [[0.0, 1.0, 0.0, 0.0]],
        "v.weight": [[0.0, 0.0, 1.0, 0.0]],
        "gate.weight": [[0.0, 0.0, 0.0, gate] for gate in gates] * heads,
        "o.weight": [[float(i == j) for j in range(heads)] for i in range(4)],
        **mapped,
    }
    return alone(spec, weights, embed=4)


def _run(module: Any, layout: TokenLayout | None = None) -> Tensor:
    return module(numbers([TOKENS]), Ctx(layout=row(8) if layout is None else layout))[0]


@oracle("nsa")
def three_ways() -> Iterator[Comparison]:
    """The output of the last token by each branch, in both forms, and by all branches with gates of ½."""
    for name in ("reference", "torch"):
        with using(name):
            summary = _run(_sparse([OPEN, SHUT, SHUT]))[:, 0]
            # probs 0.07203360, 0.12059050, 0.59876627, 0.20860962; token 6 does not see its own block
            yield Comparison(f"compressed, by {name}", summary[-2:], [0.71136979, 0.81880206])
            yield Comparison(f"a block is visible from its last token on, by {name}", summary[:2], [0.0, 0.17233276])
            # of blocks 1 and 2 the second has the larger prob: keys 0, 0 | 0, 2 | 0, 1 of values 1, 2 | 5, 6 | 7, 8
            yield Comparison(f"selected, by {name}", _run(_sparse([SHUT, OPEN, SHUT]))[-1, 0], 5.74740547)
            # keys 2, 0, 1: probs 0.66524096, 0.09003057, 0.24472847 of 6, 7, 8
            yield Comparison(f"window, by {name}", _run(_sparse([SHUT, SHUT, OPEN]))[-1, 0], 6.57948752)
            yield Comparison(f"all, half open, by {name}", _run(_sparse([0.0, 0.0, 0.0]))[-1, 0], 6.57284752)


@oracle("nsa")
def picked() -> Iterator[Comparison]:
    """The own block, the first block, the best of the others; heads of one KV head select by the sum of their probs."""
    picks: list[Tensor] = []
    two = _sparse([SHUT, OPEN, SHUT], heads=2)
    z = two(numbers([TOKENS]), Ctx(layout=row(8), taps=Listener({"*picked": lambda _, x: picks.append(x)})))[0]
    expected = [[0, -1, -1], [0, -1, -1], [1, 0, -1], [1, 0, -1], [2, 0, 1], [2, 0, 1], [3, 0, 2], [3, 0, 2]]
    yield Comparison("picked", picks[0][0, 0], expected, near=0)
    # alone the second head would select block 1 (0.28955688 against 0.05831626); together it is 0.41014739 against 0.65708254
    yield Comparison("two heads that prefer different blocks", z[-1, :2], [5.74740547, 4.16481300])
    picks.clear()
    alike = numbers([[[1.0, 0.0, value, 1.0] for value in VALUES]])  # every key is 0, so that all blocks are worth the same
    two(alike, Ctx(layout=row(8), taps=Listener({"*picked": lambda _, x: picks.append(x)})))
    yield Comparison("of equal blocks the earlier", picks[0][0, 0, -1], [3, 0, 1], near=0)
    picks.clear()
    # keys of blocks 1 and 2 are ½·silu(2) and ½·silu(2.04): the later is better by a little
    close = [[1.0, key, value, 1.0] for key, value in zip([0.0, 0.0, 1.0, 0.0, 1.0, 0.02, 0.0, 1.0], VALUES, strict=True)]
    _sparse([SHUT, OPEN, SHUT])(numbers([close]), Ctx(layout=row(8), taps=Listener({"*picked": lambda _, x: picks.append(x)})))
    yield Comparison("of nearly equal blocks the better", picks[0][0, 0, -1], [3, 0, 2], near=0)
    # a document of four tokens behind one of four: blocks are counted from its own beginning
    picks.clear()
    packed = Ctx(layout=TokenLayout.packed([[4, 4]], 8), taps=Listener({"*picked": lambda _, x: picks.append(x)}))
    two(numbers([TOKENS]), packed)
    yield Comparison("picked in a packed row", picks[0][0, 0, 4:], [[0, -1, -1], [0, -1, -1], [1, 0, -1], [1, 0, -1]], near=0)


@oracle("nsa")
def accounts() -> Iterator[Comparison]:
    """Eight tokens: 16 pairs of token and complete block, 12 in own blocks, 20 with first and best, 21 in windows of 3."""
    mixer = part("nsa", heads=1, kv_heads=1, head=1, block=2, top=1, window=3)
    scope = mixer.axes(Scope(sizes={"embed": 4}))
    # φ of 4 blocks: 2·(2 + 1) FLOPs for a key and as many for a value; all pairs: 8·4 + 2·8·8
    yield Comparison("FLOPs", mixer.cost(scope, 8), [48 + 4 * 160, 48 + 4 * 69], near=0)
    # the 9th token reads 4 complete blocks, itself, 2 selected blocks and a window of 3: 12 more
    yield Comparison("FLOPs with an incomplete block", mixer.cost(scope, 9), [48 + 4 * 198, 48 + 4 * 81], near=0)
    # 9 tokens, 4 complete blocks
    yield Comparison("values in the cache", sum(state.values(scope, 9) for state in mixer.state(scope)), 2 * 9 + 2 * 4, near=0)
    yield Comparison(
        "tokens of a window", int(mixer.visibility().visible(row(9), row(9), torch.arange(1))[0, 0, -1].sum()), 3, near=0
    )
