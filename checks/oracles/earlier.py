"""Oracles of what attention takes from an earlier layer, computed by hand on one head of two channels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dovetail.nn.cross_layer import Values
from dovetail.nn.ctx import Ctx
from dovetail.proof.laws.oracle import Comparison, alone, eye, numbers, oracle, part, row
from dovetail.spec.scope import Scope

K, V = [[[[1.0, 0.0]], [[0.0, 1.0]]]], [[[[2.0, 4.0]], [[6.0, 8.0]]]]  # of the earlier layer: two tokens, one KV head


def _given() -> Values:
    values = Values()
    values.given.update(k=numbers(K), v=numbers(V))
    return values


def _attention(earlier: Any, **weights: Any) -> Any:
    mixer = part("attention", heads=1, position=part("none"), earlier=earlier, scale=1.0)
    return alone(mixer, {"q.weight": eye(2), "o.weight": eye(2), **weights}, embed=2)


@oracle("shared_kv")
def shared_kv() -> Iterator[Comparison]:
    """The second query, (log 3, 0), scores log 3 and 0 with the keys of the earlier layer: ¾ of its first value, ¼ of its
    second."""
    mixer = _attention(part("shared_kv"))
    x = numbers([[[5.0, 5.0], [1.0986122887, 0.0]]])
    out = mixer(x, Ctx(layout=row(2)), values=_given())[0]
    yield Comparison("attention over keys and values of an earlier layer", out, [[2.0, 4.0], [3.0, 5.0]])
    kept = mixer.part.state(mixer.scope.add(embed=2))[0]
    yield Comparison("values it stores for 7 tokens", kept.values(Scope(), 7), 0, near=0)
    yield Comparison("matrices", len(list(mixer.parameters())), 2, near=0)


@oracle("value_residual")
def value_residual() -> Iterator[Comparison]:
    """v = ¼·(4, 8) + 2·(2, 4) = (5, 10), which the only token attends to."""
    kv = {"k.weight": eye(2), "v.weight": eye(2), "earlier.mix": [0.25, 2.0]}
    values = Values()
    values.given["v"] = numbers([[[[2.0, 4.0]]]])
    out = _attention(part("value_residual"), **kv)(numbers([[[4.0, 8.0]]]), Ctx(layout=row(1)), values=values)[0, 0]
    yield Comparison("a quarter of its own, twice the earlier one", out, [5.0, 10.0])
    yield Comparison("published", values.published["v"][0, 0, 0], [5.0, 10.0])
    begin = part("value_residual").constant("mix", Scope())
    yield Comparison("begins", begin, [0.5, 0.5])
