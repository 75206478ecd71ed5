"""Oracles of feed-forward networks, of (1, 2) with three hidden channels and literal weights; and their default widths."""

from __future__ import annotations

from collections.abc import Iterator

from dovetail.proof.laws.oracle import Comparison, alone, ctx, numbers, oracle, part
from dovetail.spec.scope import Scope

X = [[1.0, 2.0]]
FIRST = [[1.0, 0.0], [0.0, 1.0], [1.0, -1.0]]  # (1, 2) -> (1, 2, −1)
SECOND = [[2.0, 0.0], [0.0, 3.0], [1.0, 1.0]]  # (1, 2) -> (2, 6, 3)
DOWN = [[1.0, 0.0, 1.0], [0.0, 1.0, -1.0]]  # (a, b, c) -> (a + c, b − c)


def _width(kind: str, width: int) -> int:
    return part(kind).axes(Scope(sizes={"embed": width})).size("ffn")


@oracle("mlp")
def mlp() -> Iterator[Comparison]:
    """gelu(1) = 0.84134475, gelu(2) = 1.95449974, gelu(−1) = −0.15865525, gelu(1.5) = 1.39978920."""
    bare = alone(part("mlp", hidden=3, bias=False), {"up.weight": FIRST, "down.weight": DOWN}, embed=2)
    yield Comparison("without bias", bare(numbers(X), ctx(1)), [[0.68268949, 2.11315499]])
    biases = {"up.bias": [0.5, -1.0, 2.0], "down.bias": [0.25, -0.75]}  # hidden: gelu of 1.5, 1, 1
    full = alone(part("mlp", hidden=3), {"up.weight": FIRST, "down.weight": DOWN, **biases}, embed=2)
    yield Comparison("with bias", full(numbers(X), ctx(1)), [[2.49113394, -0.75]])
    relu = alone(part("mlp", hidden=3, bias=False, act=part("relu")), {"up.weight": FIRST, "down.weight": DOWN}, embed=2)
    yield Comparison("relu", relu(numbers(X), ctx(1)), [[1.0, 2.0]])
    yield Comparison("hidden is 4·width: 512, 28", [_width("mlp", 512), _width("mlp", 28)], [2048, 112], near=0)


@oracle("glu")
def glu() -> Iterator[Comparison]:
    """silu(1)·2 = 1.46211716, silu(2)·6 = 10.56956494, silu(−1)·3 = −0.80682426: the gate is activated, never `up`."""
    weights = {"gate.weight": FIRST, "up.weight": SECOND, "down.weight": DOWN}
    bare = alone(part("glu", hidden=3), weights, embed=2)
    yield Comparison("without bias", bare(numbers(X), ctx(1)), [[0.65529289, 11.37638920]])
    biases = {"gate.bias": [0.5, 0.5, 0.5], "up.bias": [0.1, 0.1, 0.1], "down.bias": [0.3, -0.2]}
    full = alone(part("glu", hidden=3, bias=True), {**weights, **biases}, embed=2)  # silu of 1.5, 2.5, −0.5 by 2.1, 6.1, 3.1
    yield Comparison("with bias", full(numbers(X), ctx(1)), [[2.29017156, 14.47835079]])
    bilinear = alone(part("glu", hidden=3, act=part("identity")), weights, embed=2)  # 2, 12, −3
    yield Comparison("bilinear", bilinear(numbers(X), ctx(1)), [[-1.0, 15.0]])
    halved = alone(part("glu", hidden=3, gate_multiplier=0.5), weights, embed=2)  # silu of 0.5, 1, −0.5 by 2, 6, 3
    yield Comparison("half of the gate, before its activation", halved(numbers(X), ctx(1)), [[0.05614833, 4.95266247]])
    # 8·d/3 up to a multiple of 256: 512 -> 1365.3 -> 1536, 768 -> 2048, 4096 -> 10922.7 -> 11008 (Llama's 7 B), 28 -> 74.7
    widths = [_width("glu", width) for width in (512, 768, 4096, 28, 24576)]
    yield Comparison("hidden is 8·width/3 up to a multiple of 256", widths, [1536, 2048, 11008, 256, 65536], near=0)


@oracle("dense_and_experts")
def dense_and_experts() -> Iterator[Comparison]:
    """(1, 7) has the norm (0.2, 1.4). dense: by (1, 2) it is (0.2, 2.8), swapped (2.8, 0.2), of root mean square √3.94; its
    norm by (1, 3) is (1.41061962, 0.30227563). experts, here an mlp: 3·(1, 7); its norm by (2, 1) is (0.4, 1.4). Together
    (1.81061962, 1.70227563), of root mean square √3.08804287; its norm by (1, 5)."""
    mlp = part("mlp", hidden=2, act=part("identity"), bias=False)
    spec = part("dense_and_experts", dense=mlp, experts=mlp, norm=part("rmsnorm", eps=1e-30))
    swap, thrice, same = [[0.0, 1.0], [1.0, 0.0]], [[3.0, 0.0], [0.0, 3.0]], [[1.0, 0.0], [0.0, 1.0]]
    weights = {
        "dense.up.weight": swap,
        "dense.down.weight": same,
        "experts.up.weight": thrice,
        "experts.down.weight": same,
        "dense_norm.scale": [1.0, 2.0],
        "dense_post_norm.scale": [1.0, 3.0],
        "experts_post_norm.scale": [2.0, 1.0],
        "post_norm.scale": [1.0, 5.0],
    }
    out = alone(spec, weights, embed=2)(numbers([[[1.0, 7.0]]]), ctx(1))
    yield Comparison("normed apart and together", out[0, 0], [1.03035187, 4.84348798])
    problems = [len(part("dense_and_experts", dense=one).check(Scope())) for one in (mlp, part("ple"))]
    yield Comparison("problems of an mlp and of per-layer embeddings", problems, [0, 1], near=0)
