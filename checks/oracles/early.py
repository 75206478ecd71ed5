"""Oracles of additive (2014) and multiplicative (2015) attention and of Linformer, computed by hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout
from dovetail.ops.attend import offering, using
from dovetail.proof.laws.oracle import Comparison, alone, ctx, eye, numbers, oracle, part, row
from dovetail.spec.scope import Scope


@oracle("additive_attention")
def additive_attention() -> Iterator[Comparison]:
    """Tokens (0, 0), (0, 1), (1, −1): the first channel is the query, the second the key, s = 2·tanh(q + k)."""
    weights = {"q.weight": [[1.0, 0.0]], "k.weight": [[0.0, 1.0]], "u": [[2.0]], "o.weight": eye(2)}
    module = alone(part("additive_attention", hidden=1), weights, embed=2)
    tokens = numbers([[[0.0, 0.0], [0.0, 1.0], [1.0, -1.0]]])
    for name in ("reference", "torch"):
        with using(name):
            z = module(tokens, ctx(3))[0]
            # the last: 2·tanh of 1, 2, 0 is 1.52318831, 1.92805516, 0: probs 0.36803694, 0.55172524, 0.08023782
            yield Comparison(f"the last token, by {name}", z[2], [0.08023782, 0.47148741])
            # the middle: 2·tanh of 0, 1: σ(1.52318831) for itself
            yield Comparison(f"the middle one, by {name}", z[1], [0.0, 0.82100750])
            packed = module(tokens, Ctx(layout=TokenLayout.packed([[2, 1]], 3)))[0]
            yield Comparison(f"alone in its document, by {name}", packed[2], [1.0, -1.0])
    scope = module.part.axes(Scope(sizes={"embed": 2}))
    yield Comparison(
        "cache of 5 tokens: a key and the token", sum(s.values(scope, 5) for s in module.part.state(scope)), 15, near=0
    )
    # 2·1·(1 + 2) FLOPs for each of 9 pairs, and for the 6 that the mask leaves
    yield Comparison("FLOPs of 3 tokens", module.part.cost(scope, 3), [54, 36], near=0)


@oracle("multiplicative_attention")
def multiplicative_attention() -> Iterator[Comparison]:
    """Tokens (1, 0), (0, 1), (1, 2); s = ½·(a₁b₂ + 2·a₂b₁)."""
    # the matrix takes x_i to x_iᵀW: first output 2·a₂, second a₁
    weights = {"q.weight": [[0.0, 2.0], [1.0, 0.0]], "o.weight": eye(2)}
    module = alone(part("multiplicative_attention", scale=0.5), weights, embed=2)
    for backend in offering(frozenset()):
        with using(backend.name):
            z = module(numbers([[[1.0, 0.0], [0.0, 1.0], [1.0, 2.0]]]), ctx(3))[0]
            # scores 2, ½, 3: probs 0.25371618, 0.05661173, 0.68967209
            yield Comparison(f"the last token, by {backend.name}", z[2], [0.94338827, 1.43595590])
            yield Comparison(f"the first sees itself, by {backend.name}", z[0], [1.0, 0.0])
    scope = module.part.axes(Scope(sizes={"embed": 2}))
    yield Comparison("cache of 5 tokens: the tokens", sum(s.values(scope, 5) for s in module.part.state(scope)), 10, near=0)
    yield Comparison("FLOPs of 3 tokens", module.part.cost(scope, 3), [72, 48], near=0)


SOURCE = TokenLayout.padded([3], 4, left=True)  # a source of three tokens behind one of padding


def of_source(*tokens: list[float]) -> Ctx:
    """The ctx of two tokens whose source has these tokens."""
    return Ctx(layout=row(2, start=5), encoder_output=numbers([[[9.0, 9.0], *tokens]]), encoder_layout=SOURCE)


@oracle("additive_cross_attention")
def additive_cross_attention() -> Iterator[Comparison]:
    """Queries 1 and 0, and keys 0, 1, −1 that are the second channel of the encoder output; s = 2·tanh(q + k)."""
    weights = {"q.weight": [[1.0]], "k.weight": [[0.0, 1.0]], "u": [[2.0]], "o.weight": [[1.0, 10.0]]}
    module = alone(part("additive_cross_attention", hidden=1), weights, embed=1, encoder=2)
    for name in ("reference", "torch"):
        with using(name):
            z = module(numbers([[[1.0], [0.0]]]), of_source([0.0, 0.0], [0.0, 1.0], [1.0, -1.0]))
            # 2·tanh of 1, 2, 0: probs 0.36803694, 0.55172524, 0.08023782, so 0.08023782 + 10·0.47148741;
            # 2·tanh of 0, 1, −1: probs 0.17226998, 0.79017246, 0.03755756
            yield Comparison(f"a left-padded encoder output, by {name}", z.flatten(), [4.79511197, 7.56370659])
    yield from _per_source(module.part, {"embed": 1, "encoder": 2}, 9)
    yield Comparison("FLOPs of 3 tokens: all pairs", module.part.cost(module.scope, 3), [54, 54], near=0)


@oracle("multiplicative_cross_attention")
def multiplicative_cross_attention() -> Iterator[Comparison]:
    """s = ½·x·(2·y₁ + y₂)."""
    module = alone(
        part("multiplicative_cross_attention", scale=0.5),
        {"q.weight": [[2.0], [1.0]], "o.weight": [[1.0, 10.0]]},
        embed=1,
        encoder=2,
    )
    for backend in offering(frozenset()):
        with using(backend.name):
            z = module(numbers([[[1.0], [-1.0]]]), of_source([1.0, 0.0], [0.0, 1.0], [1.0, 2.0]))
            # scores 1, ½, 2: probs 0.23122390, 0.14024438, 0.62853172, so 0.85975562 + 10·1.39730782; then −1, −½, −2
            yield Comparison(f"a left-padded encoder output, by {backend.name}", z.flatten(), [14.83283383, 8.35797753])
    yield from _per_source(module.part, {"embed": 1, "encoder": 2}, 6)
    yield Comparison("FLOPs of 3 tokens: all pairs", module.part.cost(module.scope, 3), [72, 72], near=0)


def _per_source(mixer: Any, sizes: dict[str, int], values: int) -> Iterator[Comparison]:
    scope = mixer.axes(Scope(sizes=sizes))
    states = mixer.state(scope)
    yield Comparison("its cache is per source", {state.per for state in states} == {"source"}, True)
    yield Comparison("cache of 3 source tokens", sum(state.values(scope, 3) for state in states), values, near=0)


@oracle("linformer")
def linformer() -> Iterator[Comparison]:
    """Keys 1, 0, 1 become (1 + 1, 0 + 1) = (2, 1), values 1, 2, 4 become (1 + 2, 4) = (3, 4); a query of 1 scores 2, 1."""
    weights = {
        "q.weight": [[1.0, 0.0, 0.0]],
        "k.weight": [[0.0, 1.0, 0.0]],
        "v.weight": [[0.0, 0.0, 1.0]],
        "k_map": [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]],
        "v_map": [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]],
        "o.weight": [[1.0], [0.0], [0.0]],
    }
    module = alone(part("linformer", heads=1, head=1, rank=2, length=3), weights, embed=3)
    tokens = numbers([[[1.0, 1.0, 1.0], [1.0, 0.0, 2.0], [0.0, 1.0, 4.0]]])
    for backend in offering(frozenset()):
        with using(backend.name):
            z = module(tokens, ctx(3))[0, :, 0]
            # 0.73105858·3 + 0.26894142·4; a query of 0 gives the mean; the first token sees the last
            yield Comparison(f"one document, by {backend.name}", z, [3.26894142, 3.26894142, 3.5])
            z = module(tokens, Ctx(layout=TokenLayout.packed([[1, 2]], 3)))[0, :, 0]
            # alone: key (1, 0), value (1, 0), so 0.73105858; the second: keys 0, 1 become (0, 1), values 2, 4 become (6, 0)
            yield Comparison(f"two documents, by {backend.name}", z, [0.73105858, 1.61364853, 3.0])
    scope = module.part.axes(Scope(sizes={"embed": 3}))
    yield Comparison("FLOPs are linear in n", [module.part.cost(scope, n)[0] for n in (3, 6)], [48, 96], near=0)
    yield Comparison("decode states", len(module.part.state(scope)), 0, near=0)
