"""attend: of the backends whose offers contain the needs, the cheapest for this shape.

    z = softmax(cap(q kᵀ · scale) + bias, where allowed) v        q (…, n, heads, head)   k, v (…, m, kv_heads, head)

A backend is a name, a set of offers, a cost and a function. What is needed is plain data: the part's own needs, and what
this call adds (a listener that edits the pattern, a compiler that cannot follow Python, a learned sink).
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Callable
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from dovetail.core.at import At
from dovetail.core.errors import BackendError
from dovetail.core.group import Mask
from dovetail.ops import attend_ref, attend_tiled, attend_torch
from dovetail.ops.form import FORCED, using
from dovetail.ops.mask import dense

__all__ = ["BACKENDS", "Backend", "Rule", "Shape", "attend", "choose", "chosen", "is_plain", "offering", "using"]


@dc.dataclass(slots=True)
class Rule:
    """How scores become weights."""

    mask: Mask
    scale: float
    heads: Tensor  # (heads,) the head numbers this rank holds
    softcap: float | None = None
    bias: Callable[..., Tensor] | None = None  # (q at, k at, *tables) -> (…, heads, n, m)
    tables: tuple[Tensor, ...] = ()
    sink: Tensor | None = None  # (heads,) a learned logit that takes weight and gives nothing
    edit: Callable[[Tensor], Tensor] | None = None  # sees the weights (…, heads, n, m), may answer with others


class Shape(NamedTuple):
    """What a cost depends on."""

    rows: int
    queries: int
    keys: int
    heads: int
    head: int
    plain: bool  # the kernel's own causal flag, or no mask at all, says it all
    touched: int  # scores of one head and row in the tiles that the mask touches


class Backend(NamedTuple):
    """One way to compute attention."""

    name: str
    offers: frozenset[str]
    cost: Callable[[Shape, frozenset[str]], float]
    run: Callable[..., Tensor]
    dense: bool  # wants the allowed pairs as one tensor …
    flags: bool = False  # … but not where a causal flag says it all


BACKENDS: list[Backend] = [
    Backend("torch", attend_torch.OFFERS, attend_torch.cost, attend_torch.run, dense=True, flags=True),
    Backend("tiled", attend_tiled.OFFERS, attend_tiled.cost, attend_tiled.run, dense=False),
    Backend("reference", attend_ref.OFFERS, attend_ref.cost, attend_ref.run, dense=True),
]


def offering(needs: frozenset[str]) -> list[Backend]:
    """The backends that offer all of the needs (and are not excluded by `using`)."""
    return [b for b in BACKENDS if needs <= b.offers and (not FORCED or b.name == FORCED[-1])]


def choose(needs: frozenset[str], shape: Shape) -> Backend:
    """The cheapest that offers all of the needs."""
    able = offering(needs)
    if not able:
        only = f" (only {FORCED[-1]!r} was allowed)" if FORCED else ""
        raise BackendError(f"no attention kernel offers all of {sorted(needs)}{only}")
    return able[0] if len(able) == 1 else min(able, key=lambda backend: backend.cost(shape, needs))


def is_plain(mask: Mask, q: At, k: At) -> bool:
    """Whether the mask over these tokens is 'all', or top-left causal, and nothing else: known without looking."""
    if q.start is None or k.start != 0:
        return False
    if mask.flag() == "causal":  # one query at the end sees every key
        return (q.start == 0 and q.n == k.n) or (q.n == 1 and q.start == k.n - 1)
    return mask.flag() == "all"


def attend(q: Tensor, k: Tensor, v: Tensor, rule: Rule, qa: At, ka: At, needs: frozenset[str]) -> Tensor:
    """Attention of q over k, v: (…, n, heads, head).

    Shapes: q (…, n, heads, head), k and v (…, m, kv_heads, head); `…` is batch, or nothing for a flat batch.
    """
    backend, plain = chosen(q, rule, qa, ka, needs)
    seen = None
    if backend.dense:
        seen = rule.mask.flag() if plain and backend.flags else dense(rule.mask, qa, ka, rule.heads)
    out = backend.run(q.transpose(-3, -2), k.transpose(-3, -2), v.transpose(-3, -2), rule, qa, ka, seen)
    return out.transpose(-3, -2)


def chosen(q: Tensor, rule: Rule, qa: At, ka: At, needs: frozenset[str]) -> tuple[Backend, bool]:
    """The backend, and whether the mask is plain: asked by every layer, answered once a step for those that ask alike."""
    if torch.compiler.is_compiling():
        return _look(q, rule, qa, ka, needs | {"compile"})
    key = ("backend", rule.mask.key, rule.bias is None, needs, q.shape, FORCED[-1] if FORCED else None)
    return ka.once_for(qa, key, _look, q, rule, qa, ka, needs)


def _look(q: Tensor, rule: Rule, qa: At, ka: At, needs: frozenset[str]) -> tuple[Backend, bool]:
    plain = rule.bias is None and is_plain(rule.mask, qa, ka)
    *rows, n, heads, head = q.shape
    # the tiles are looked for only where skipping some could pay; if so, the kernel finds them ready
    worth = not plain and n >= 4 * attend_tiled.TILE and "compile" not in needs
    touched = attend_tiled.touched(rule, qa, ka) if worth else n * ka.n
    return choose(needs, Shape(prod(rows), n, ka.n, heads, head, plain, touched)), plain
