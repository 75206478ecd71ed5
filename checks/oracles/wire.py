"""Oracles of wires: a block on the single token (1, 7), with branches simple enough to compute by hand.

    mixer f(x) = 2·(x₂, x₁)          ffn g(x) = 3·x          norm(1, 7) = (0.2, 1.4), for √((1 + 49)/2) = 5

One token attends to itself only, so attention is W_o W_v x. The norms have different scales, so that none can replace
another: mixer (1, 1), ffn (1, 2), after the mixer (2, 1), after the ffn (1, 3).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from dovetail.nn.ctx import Ctx
from dovetail.nn.draws import Draws
from dovetail.proof.laws.oracle import Comparison, alone, eye, numbers, oracle, part, row

SCALES = {
    "norm.scale": [1.0, 1.0],
    "mixer_norm.scale": [1.0, 1.0],
    "ffn_norm.scale": [1.0, 2.0],
    "mixer_post_norm.scale": [2.0, 1.0],
    "ffn_post_norm.scale": [1.0, 3.0],
}
BRANCHES = {
    "mixer.q.weight": eye(2),
    "mixer.k.weight": eye(2),
    "mixer.v.weight": eye(2),
    "mixer.o.weight": [[0.0, 2.0], [2.0, 0.0]],
    "ffn.up.weight": eye(2),
    "ffn.down.weight": eye(2, 3.0),
}
LAYER_SCALE = [[0.5, 0.25], [2.0, 1.0]]  # of the mixer, of the ffn


def attention() -> Any:
    """A mixer of one head."""
    return part("attention", heads=1, position=part("none"))


def mlp() -> Any:
    """An ffn that is a matrix."""
    return part("mlp", hidden=2, act=part("identity"), bias=False)


def block_with(wire: Any, norms: tuple[str, ...], **weights: Any) -> Any:
    """A block with these branches, this wire and its norms; `weights` are those of the wire."""
    return another_block("block", {"wire": wire}, norms, weights)


def another_block(kind: str, fields: Mapping[str, Any], norms: tuple[str, ...], weights: Mapping[str, Any]) -> Any:
    """A block of another kind, with fields and weights of its own."""
    block = part(kind, mixer=attention(), ffn=mlp(), norm=part("rmsnorm", eps=1e-30), **fields)
    scales = {f"{name}.scale": SCALES[f"{name}.scale"] for name in norms}
    return alone(block, {**BRANCHES, **scales, **weights}, embed=2)


def through(block: Any, seed: int | None = None) -> Tensor:
    """The token (1, 7) after the block."""
    return block(numbers([[[1.0, 7.0]]]), Ctx(layout=row(1), draws=None if seed is None else Draws(seed)), {})[0, 0]


def _added(kind: str, norms: tuple[str, ...], halves: list[float]) -> Iterator[Comparison]:
    """Multiplier, layer scale and dropout act on what a branch adds, the stream's scale on what leaves the block, alike in
    every wire; `halves` is half of what leaves it otherwise."""
    stream = block_with(part(kind, stream_scale=True), norms, **{"wire.stream": [0.5]})
    yield Comparison("the residual stream, halved", through(stream), halves)
    scaled = block_with(part(kind, multiplier=0.5, layer_scale=0.7), norms, **{"wire.scale": LAYER_SCALE})
    plain = block_with(part(kind), norms)
    x, ctx = numbers([[[2.0, 4.0]]]), Ctx(layout=row(1))
    expected = {"mixer": [[[0.5, 0.5]]], "ffn": [[[2.0, 2.0]]]}  # ½ · (0.5, 0.25) · (2, 4) and ½ · (2, 1) · (2, 4)
    for branch, values in expected.items():
        yield Comparison(f"added by {branch}, scaled", scaled.wire.added(x, scaled, branch, ctx), values)
        yield Comparison(f"added by {branch}", plain.wire.added(x, plain, branch, ctx), [[[2.0, 4.0]]])
    dropping = block_with(part(kind, dropout=0.5), norms)
    kept = dropping.wire.added(numbers([[[1.0] * 2] * 32]), dropping, "ffn", Ctx(layout=row(32), draws=Draws(3)))
    yield Comparison("dropout ½ leaves 0 or 2", sorted(set(kept.flatten().tolist())), [0.0, 2.0])
    yield Comparison("dropout only in training", dropping.wire.added(x, dropping, "ffn", ctx), [[[2.0, 4.0]]])


@oracle("pre_norm")
def pre_norm() -> Iterator[Comparison]:
    """f(0.2, 1.4) = (2.8, 0.4), so (3.8, 7.4), of root mean square √34.6 = 5.8821765; + 3·(0.64601935, 2·1.25803768)."""
    norms = ("mixer_norm", "ffn_norm")
    yield Comparison("x + f(norm x)", through(block_with(part("pre_norm"), norms)), [5.73805814, 14.94822645])
    # (1, 7) + ½·(0.5, 0.25)·(2.8, 0.4) = (1.7, 7.05); √26.29625 = 5.1279869
    scaled = block_with(part("pre_norm", multiplier=0.5, layer_scale=0.7), norms, **{"wire.scale": LAYER_SCALE})
    yield Comparison("scaled", through(scaled), [2.69454232, 11.17442549])
    # f(1, 7) = (14, 2), so (15, 9), over √153; + 3·(1.21267813, 2·0.72760688)
    bare = block_with(part("pre_norm", first_norm=False), ("ffn_norm",))
    yield Comparison("x + f(x), then x + g(norm x)", through(bare), [18.63803438, 13.36564125])
    yield from _added("pre_norm", norms, [2.86902907, 7.47411323])


@oracle("post_norm")
def post_norm() -> Iterator[Comparison]:
    """(1, 7) + (14, 2) = (15, 9), over √153: (1.21267813, 0.72760688); four times that, normed again, by (1, 2)."""
    norms = ("mixer_norm", "ffn_norm")
    yield Comparison("norm(x + f x)", through(block_with(part("post_norm"), norms)), [1.21267813, 1.45521375])
    scaled = block_with(part("post_norm", multiplier=0.5, layer_scale=0.7), norms, **{"wire.scale": LAYER_SCALE})
    yield Comparison("scaled", through(scaled), [0.99653383, 2.00690840])
    yield from _added("post_norm", norms, [0.60633906, 0.72760688])


@oracle("sandwich_norm")
def sandwich_norm() -> Iterator[Comparison]:
    """norm(2.8, 0.4) = (1.4, 0.2), by (2, 1): (3.8, 7.2); √33.14 = 5.7567352; norm(3·(0.66009602, 2·1.25071)) by (1, 3)."""
    norms = ("mixer_norm", "mixer_post_norm", "ffn_norm", "ffn_post_norm")
    yield Comparison("x + norm(f(norm x))", through(block_with(part("sandwich_norm"), norms)), [4.16084262, 11.30221080])
    yield from _added("sandwich_norm", norms, [2.08042131, 5.65110540])


@oracle("res_post_norm")
def res_post_norm() -> Iterator[Comparison]:
    """norm(14, 2) = (1.4, 0.2): (2.4, 7.2); norm of three times that is (0.4472136, 1.3416408), by (1, 2)."""
    norms = ("mixer_norm", "ffn_norm")
    yield Comparison("x + norm(f x)", through(block_with(part("res_post_norm"), norms)), [2.84721360, 9.88328157])
    yield from _added("res_post_norm", norms, [1.42360680, 4.94164079])


@oracle("parallel")
def parallel() -> Iterator[Comparison]:
    """(1, 7) + (2.8, 0.4) + 3·(0.2, 1.4) with one norm; 3·(0.2, 2.8) where the ffn has its own."""
    yield Comparison("one norm", through(block_with(part("parallel"), ("norm",))), [4.4, 11.6])
    two = ("mixer_norm", "ffn_norm")
    yield Comparison("one norm per branch", through(block_with(part("parallel", one_norm=False), two)), [4.4, 15.8])
    yield from _added("parallel", ("norm",), [2.2, 5.8])
