"""Oracles of attention, on numbers small enough to compute by hand.

    q = (1, 0)     K = (1, 0), (0, 1), (1, 1)     V = 10, 20, 30 (and 1, 2, 4, so that an exchange of keys shows)

Scores over √2: 0.70710678, 0, 0.70710678; e^ of them 2.02811498, 1, 2.02811498, with the sum 5.05622996; probs
0.40111209, 0.19777581, 0.40111209; outputs 20.0 and 2.40111209. The six channels of a token are its q, k and v; W_q, W_k and
W_v select them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dovetail.nn.ctx import Ctx, Listener
from dovetail.nn.layout import TokenLayout
from dovetail.ops.attend import offering, using
from dovetail.proof.laws.oracle import Comparison, alone, numbers, oracle, part, row
from dovetail.spec.scope import Scope

TOKENS = [
    [0.0, 0.0, 1.0, 0.0, 10.0, 1.0],
    [0.0, 1.0, 0.0, 1.0, 20.0, 2.0],
    [1.0, 0.0, 1.0, 1.0, 30.0, 4.0],
]


def _pick(*channels: int, of: int = 6) -> list[list[float]]:
    """A matrix whose rows select these channels."""
    return [[1.0 if column == channel else 0.0 for column in range(of)] for channel in channels]


Q, K, V = _pick(0, 1), _pick(2, 3), _pick(4, 5)
OUT = [[1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]  # z to the first two channels
WEIGHTS: dict[str, Any] = {"q.weight": Q, "k.weight": K, "v.weight": V, "o.weight": OUT}


def _attention(weights: dict[str, Any] | None = None, **fields: Any) -> Any:
    fields = {"heads": 1, "head": 2, "position": part("none"), **fields}
    return alone(part("attention", **fields), weights or WEIGHTS, embed=6)


def _last(module: Any, channels: int = 2, layout: TokenLayout | None = None) -> Tensor:
    """The output of the last of the three tokens."""
    layout = row(3) if layout is None else layout
    return module(numbers([TOKENS]), Ctx(layout=layout))[0, -1, :channels]


@oracle("attention")
def every_backend() -> Iterator[Comparison]:
    """Token 0 sees itself; token 1, q = (0, 1), has probs 0.33023845 and 0.66976155; token 2 is the example."""
    expected = [[10.0, 1.0], [16.69761549, 1.66976155], [20.0, 2.40111209]]
    for backend in offering(frozenset()):
        with using(backend.name):
            z = _attention()(numbers([TOKENS]), Ctx(layout=row(3)))[0, :, :2]
            yield Comparison(f"causal, by {backend.name}", z, expected)
            # other documents of a packed row are not visible: token 2 is a document of its own
            packed = TokenLayout.packed([[2, 1]], 3)
            yield Comparison(f"packed, by {backend.name}", _last(_attention(), layout=packed), [30.0, 4.0])
            both = _attention(mask=part("full"))(numbers([TOKENS]), Ctx(layout=row(3)))[0, 1, :2]
            # token 1 against all: e^ of 0, 0.70710678, 0.70710678 again, so 0.19777581, 0.40111209, 0.40111209
            yield Comparison(f"full, by {backend.name}", both, [22.03336278, 2.60444837])


@oracle("attention")
def pattern() -> Iterator[Comparison]:
    """The probs, at the tap `pattern`."""
    patterns: list[Tensor] = []
    module = _attention()
    module(numbers([TOKENS]), Ctx(layout=row(3), taps=Listener({"*pattern": lambda _, x: patterns.append(x)})))
    rows = [[1.0, 0.0, 0.0], [0.33023845, 0.66976155, 0.0], [0.40111209, 0.19777581, 0.40111209]]
    yield Comparison("probs", patterns[0], [[rows]])


@oracle("attention")
def variations() -> Iterator[Comparison]:
    """Each field that changes the scores, with every backend that offers it."""
    cases: list[tuple[str, Any, list[float]]] = [
        ("scale 2: scores 2, 0, 2", _attention(scale=2.0), [20.0, 2.46831053]),
        # ½·tanh(2·0.70710678) = 0.44419264
        ("soft-cap ½", _attention(softcap=0.5), [20.0, 2.37859546]),
        # one more column of e^½ = 1.64872127 in the sum, 6.70495123
        ("sink ½", _attention({**WEIGHTS, "sink": [0.5]}, sink=True), [15.08207826, 1.81068803]),
        # two more keys, (1, 0) and (0, 1), with scores 0.70710678 and 0: the sum is 8.08434494
        (
            "prefix",
            _attention({**WEIGHTS, "prefix_k": [[1.0, 0.0], [0.0, 1.0]], "prefix_v": [[50.0, 8.0], [60.0, 16.0]]}, prefix=2),
            [32.47391720, 5.48782803],
        ),
        # σ(0) = ½ and σ(x₁ = 1) = 0.73105858
        ("gate", _attention({**WEIGHTS, "gate.weight": [[0.0] * 6, _pick(0)[0]]}, gate=True), [10.0, 1.75535359]),
        # a single head has the slope 2^−8: scores 0.69929428, −0.00390625, 0.70710678
        ("alibi", _attention(position=part("alibi")), [20.03133677, 2.40581321]),
        # q = (1.5, 0), k = (1, 0.5), (0, 1.5), (1, 1.5), v + (100, 0): scores 1.06066017, 0, 1.06066017
        (
            "biases",
            _attention(
                {**WEIGHTS, "q.bias": [0.5, 0.0], "k.bias": [0.0, 0.5], "v.bias": [100.0, 0.0], "o.bias": [0.0] * 5 + [7.0]},
                bias=True,
                out_bias=True,
            ),
            [120.0, 2.42621619],
        ),
    ]
    for name, module, expected in cases:
        for backend in offering(module.needs):
            with using(backend.name):
                yield Comparison(f"{name}, by {backend.name}", _last(module), expected)
    out_bias = {**WEIGHTS, "o.bias": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]}
    yield Comparison("output bias", _last(_attention(out_bias, out_bias=True), 6), [21.0, 4.40111209, 3.0, 4.0, 5.0, 6.0])


@oracle("attention")
def normed() -> Iterator[Comparison]:
    """QK-norm of q = (1, 0): (√2, 0); of k: (√2, 0), (0, √2), (1, 1); scores over √2: √2, 0, 1."""
    norm = {"q_norm.scale": [1.0, 1.0], "k_norm.scale": [1.0, 1.0]}
    fields: dict[str, Any] = {"qk_norm": part("rmsnorm", eps=1e-30)}
    # e^ of 1.41421356, 0, 1: 4.11325038, 1, 2.71828183 of sum 7.83153221
    yield Comparison("each head", _last(_attention({**WEIGHTS, **norm}, **fields)), [18.21877953, 2.16897246])
    # behind a rotation by p: q = √2·(cos 2, sin 2); k = (√2, 0), √2·(−sin 1, 2 cos 1), (cos 2 − sin 2, 2 cos 2 + 2 sin 2)
    # scores over √2: −0.58852050, 1.88481643, 1.44842056; e^ of them 0.55514802, 6.58514552, 4.25638651 of sum 11.39668004
    turned = {**WEIGHTS, "q_norm.scale": [1.0, 1.0], "k_norm.scale": [1.0, 2.0]}
    after = _attention(turned, **fields, position=part("rope"), qk_norm_after=True)
    yield Comparison("behind the rotation", _last(after), [23.24764622, 2.69824063])
    # two heads q = (1), (0) of one channel, normed together: (√2, 0), and k likewise; scores √2·(√2, 0, 1) and 0
    fields |= {"heads": 2, "head": 1, "qk_norm_whole": True}
    whole = _last(_attention({**WEIGHTS, **norm}, **fields))
    # head 0: e^ of 2, 0, 1.41421356 : 7.38905610, 1, 4.11325038 of 12.50230648, of v₁; head 1: the mean 7/3 of v₂
    yield Comparison("all heads at once", whole, [17.37983889, 2.33333333])


@oracle("attention")
def values() -> Iterator[Comparison]:
    """Values normed per head: (10, 1)/√50.5, (20, 2)/√202, (30, 4)/√458; and values that are the projected keys."""
    norm = part("rmsnorm", eps=1e-30, scale=False)
    # 0.40111209·(1.40719508 + 1.40181069) + 0.19777581·1.40719508, and so for 0.14071951, 0.14071951 and 0.18690809
    yield Comparison("normed", _last(_attention(v_norm=norm)), [1.40503424, 0.15924616])
    keys = {name: matrix for name, matrix in WEIGHTS.items() if name != "v.weight"}
    # v = (1, 0), (0, 1), (1, 1) with probs 0.40111209, 0.19777581, 0.40111209
    yield Comparison("keys", _last(_attention(keys, k_is_v=True)), [0.80222419, 0.59888791])
    # before the norm of keys: scores over √2 are √2, 0, 1, with probs 0.52521659, 0.12768893, 0.34709448; v of norm √2 each
    scales = {"q_norm.scale": [1.0, 1.0], "k_norm.scale": [1.0, 3.0]}
    fields: dict[str, Any] = {"k_is_v": True, "v_norm": norm, "qk_norm": part("rmsnorm", eps=1e-30)}
    # v = (√2, 0), (0, √2), (1, 1)
    yield Comparison("normed keys", _last(_attention({**keys, **scales}, **fields)), [1.08986289, 0.52767393])
    # cross attention of the keys (1, 0), (0, 1), (1, 1) alone, as above
    cross = {"q.weight": _pick(0, 1, of=2), "k.weight": _pick(0, 1, of=4), "o.weight": _pick(0, 1, of=2)}
    encoded = {"encoder_output": numbers(TOKENS)[None, :, 2:], "encoder_layout": row(3)}
    cases = (("keys", {}, [0.80222419, 0.59888791]), ("normed keys", {"v_norm": norm}, [0.96837025, 0.68080933]))
    for name, fields, expected in cases:
        module = alone(part("cross_attention", heads=1, head=2, k_is_v=True, **fields), cross, embed=2, encoder=4)
        yield Comparison(f"{name} of an encoder", module(numbers([[[1.0, 0.0]]]), Ctx(layout=row(1), **encoded)), [[expected]])


@oracle("attention")
def grouped() -> Iterator[Comparison]:
    """Heads 0, 1 share the first KV head and heads 2, 3 the second; one channel per head."""
    # q = (1, 0) of heads of one channel: scores of head h are q_h·k_g
    # k₀ = 1, 0, 1 and k₁ = 0, 1, 1; v₀ = 1, 2, 4 and v₁ = 10, 20, 30
    q = _pick(0, 1, 0, 1)
    weights = {
        "q.weight": q,
        "k.weight": K,
        "v.weight": _pick(5, 4),
        "o.weight": [*_pick(0, 1, 2, 3, of=4), [0.0] * 4, [0.0] * 4],
    }
    # scores 1, 0, 1: probs 0.42231880, 0.15536241, 0.42231880; where q is 0, the mean
    expected = [2.42231880, 2.33333333, 22.66956395, 20.0]
    split = alone(part("attention", heads=4, kv_heads=2, head=1, position=part("none")), weights, embed=6)
    for backend in offering(frozenset()):
        with using(backend.name):
            yield Comparison(f"4 heads, 2 KV heads, by {backend.name}", _last(split, 4), expected)
    # packed: a group's queries, its key, its value, then the next group's
    together = {"qkv.weight": [*_pick(0, 1, 2, 5), *_pick(0, 1, 3, 4)], "o.weight": weights["o.weight"]}
    packed = alone(part("attention", heads=4, kv_heads=2, head=1, packed=True, position=part("none")), together, embed=6)
    yield Comparison("packed", _last(packed, 4), expected)


@oracle("attention")
def accounts() -> Iterator[Comparison]:
    """8 heads of 32 at width 256, 2 KV heads: 4·256 FLOPs per pair of tokens, a KV cache of 2·2·32 values per token."""
    mixer = part("attention", kv_heads=2)
    scope = mixer.axes(Scope(sizes={"embed": 256}))
    yield Comparison("head", scope.size("head"), 32, near=0)
    mqa = part("attention", heads=3, kv_heads=1).axes(Scope(sizes={"embed": 6}))
    yield Comparison("packed: 3 queries, a key and a value", mqa.size("slots"), 5, near=0)
    # all 10² pairs, as the reference computes them; the 55 on and below the diagonal
    yield Comparison("FLOPs of 10 tokens", mixer.cost(scope, 10), [102400, 56320], near=0)
    yield Comparison("KV cache after 10 tokens", sum(s.values(scope, 10) for s in mixer.state(scope)), 1280, near=0)
    near = part("attention", kv_heads=2, mask=part("causal") & part("window", size=4, keep=2))
    yield Comparison("KV cache with a window of 4, keep 2", sum(s.values(scope, 10) for s in near.state(scope)), 768, near=0)
    # 10 tokens see 1, 2, 3, 4, 5, 6 … 6 keys
    yield Comparison("FLOPs with the window", near.cost(scope, 10), [102400, 46080], near=0)
    yield Comparison(
        "decode states of bidirectional attention", len(part("attention", mask=part("full")).state(scope)), 0, near=0
    )


@oracle("cross_attention")
def cross() -> Iterator[Comparison]:
    """The same keys and values from an encoder output whose first token is padding; a query sees all of it, and not itself."""
    encoder_output = torch.cat([torch.full((1, 4), 9.0, dtype=torch.float64), numbers(TOKENS)[:, 2:]])[None]
    weights = {"q.weight": _pick(0, 1, of=2), "k.weight": _pick(0, 1, of=4), "v.weight": _pick(2, 3, of=4)}
    module = alone(part("cross_attention", heads=1, head=2), {**weights, "o.weight": _pick(0, 1, of=2)}, embed=2, encoder=4)
    for backend in offering(frozenset()):
        ctx = Ctx(layout=row(2, start=5), encoder_output=encoder_output, encoder_layout=TokenLayout.padded([3], 4, left=True))
        with using(backend.name):
            z = module(numbers([[[1.0, 0.0], [0.0, 0.0]]]), ctx)
            yield Comparison(f"a left-padded encoder output, by {backend.name}", z, [[[20.0, 2.40111209], [20.0, 2.33333333]]])
    (state,) = module.part.state(module.scope)
    yield Comparison("its KV cache is per source", state.per, "source")
    yield Comparison("KV cache of 3 source tokens: 2·2 values each", state.values(module.scope, 3), 12, near=0)
