"""Oracles of multi-head latent attention (MLA), computed by hand, in both of its forms.

A token has seven channels: a query (one without position, two that are rotated), a latent (two), a rotated key (two). One head;
scale 1/√3:

    latents (1, 1), (0, 2), (1, 4)     key = first number, value = second     rotated keys (1, 0)     q of the last token

A query of 1 without position: scores 0.57735027, 0, 0.57735027, so 0.39041395·1 + 0.21917211·2 + 0.39041395·4 = 2.39041395.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from dovetail.nn.ctx import Ctx
from dovetail.ops.attend import offering, using
from dovetail.proof.laws.oracle import Comparison, alone, ctx, numbers, oracle, part, row
from dovetail.spec.scope import Scope

LATENTS = [[1.0, 1.0], [0.0, 2.0], [1.0, 4.0]]
WIDE = 1e8  # a norm with eps = WIDE² and scale WIDE does nothing
VALUE = 5  # more channels of a value than of the latent, so that all but the reference choose the absorbed form


def _tokens(still: float, turning: float) -> Tensor:
    """Three tokens with this query: its channel without position, and its first rotated channel."""
    return numbers([[[still, turning, 0.0, *latent, 1.0, 0.0] for latent in LATENTS]])


def _pick(*channels: int, of: int = 7) -> list[list[float]]:
    return [[1.0 if column == channel else 0.0 for column in range(of)] for channel in channels]


def _latent(weights: dict[str, Any] | None = None, heads: int = 1, **fields: Any) -> Any:
    """Keys are the latent's first number, values its second (and zeros)."""
    fields = {
        "heads": heads,
        "kv_rank": 2,
        "nope": 1,
        "rope": 2,
        "value": VALUE,
        "norm": part("rmsnorm", eps=WIDE**2),
        **fields,
    }
    plain: dict[str, Any] = {
        "q.weight": _pick(0, 1, 2) * heads,
        "kv_down.weight": _pick(3, 4),
        "kv_norm.scale": [WIDE, WIDE],
        "turned.weight": _pick(5, 6),
        "k_up.weight": _pick(0, of=2) * heads,
        "v_up.weight": (_pick(1, of=2) + [[0.0, 0.0]] * (VALUE - 1)) * heads,
        "o.weight": _pick(*(VALUE * i for i in range(heads)), of=VALUE * heads) + [[0.0] * VALUE * heads] * (7 - heads),
    }
    return alone(part("mla", **fields), {**plain, **(weights or {})}, embed=7)


@oracle("mla")
def both_forms() -> Iterator[Comparison]:
    """Scores by content, by position, by both; the reference implementation expands keys, the others attend to the latents."""
    for backend in offering(frozenset()):
        with using(backend.name):
            for what, still, turning, expected in (
                ("by content", 1.0, 0.0, 2.39041395),
                # the query at 2 and keys at 0, 1, 2 are rotated by their positions: cos 2, cos 1, cos 0 over √3, that is
                # −0.24026249, 0.31194368, 0.57735027: probs 0.19991335, 0.34726570, 0.45282095
                ("by position", 0.0, 1.0, 2.70572854),
                ("by both", 1.0, 1.0, 2.83253761),
            ):
                z = _latent()(_tokens(still, turning), ctx(3))[0, -1, 0]
                yield Comparison(f"{what}, by {backend.name}", z, expected)
            # a second head with key and value swapped: scores (1, 2, 4)/√3, values 1, 0, 1
            two = {
                "k_up.weight": _pick(0, 1, of=2),
                "v_up.weight": [*_pick(1, of=2), *[[0.0, 0.0]] * 4, *_pick(0, of=2), *[[0.0, 0.0]] * 4],
            }
            z = _latent(two, heads=2)(_tokens(1.0, 0.0), ctx(3))[0, -1, :2]
            yield Comparison(f"two heads, by {backend.name}", z, [2.39041395, 0.78878254])


@oracle("mla")
def latents() -> Iterator[Comparison]:
    """The norm of the latents, and the latent of the queries."""
    token = numbers([[[1.0, 0.0, 0.0, 3.0, 4.0, 0.0, 0.0]]])
    normed = _latent({"kv_norm.scale": [1.0, 2.0]}, norm=part("rmsnorm", eps=1e-30))
    # (3, 4) over √12.5 is (0.84852814, 1.13137085)
    yield Comparison("a value from a normalized latent", normed(token, ctx(1))[0, 0, 0], 2.26274170)
    # a query latent of one number: 5, normed to 1, times 3. Latents normed: (1, 1), (0, 1.41421356), (0.34299717, 1.37198868)
    own = {"q_down.weight": _pick(0), "q_norm.scale": [3.0], "q.weight": [[1.0], [0.0], [0.0]], "kv_norm.scale": [1.0, 1.0]}
    z = _latent(own, q_rank=1, norm=part("rmsnorm", eps=1e-30))(_tokens(5.0, 0.0), ctx(3))[0, -1, 0]
    # scores 1.73205081, 0, 0.59408853: probs 0.66782753, 0.11815285, 0.21401962
    yield Comparison("a query from its own latent", z, 1.12855339)
    scaled = _latent(scale=0.0)(_tokens(1.0, 1.0), Ctx(layout=row(3)))[0, -1, 0]
    yield Comparison("a scale of 0: the mean of 1, 2, 4", scaled, 2.33333333)


@oracle("mla")
def accounts() -> Iterator[Comparison]:
    """DeepSeek-V3: 128 heads of 128 + 64, latents of 512 and 1536, width 7168."""
    mixer = part("mla", heads=128, q_rank=1536)
    scope = mixer.axes(Scope(sizes={"embed": 7168}))
    yield Comparison("values in the cache per token", sum(s.values(scope, 1) for s in mixer.state(scope)), 576, near=0)
    matrices = sum(w.shape(scope)[0] * w.shape(scope)[1] for w in mixer.weights(scope) if w.matmul)
    yield Comparison("weights in its matrices", matrices, 187105280, near=0)
    # 2·128·(192 + 128) FLOPs per pair of tokens: all 100, and the 55 on and below the diagonal
    yield Comparison("FLOPs of 10 tokens", mixer.cost(scope, 10), [8192000, 4505600], near=0)
