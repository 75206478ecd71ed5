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

from dovetail.core.errors import BackendError
from dovetail.core.group import Mask
from dovetail.core.layout import TokenLayout
from dovetail.ops import attend_ref, attend_tiled, attend_torch
from dovetail.ops.form import FORCED, using
from dovetail.ops.mask import dense

__all__ = ["BACKENDS", "Backend", "Scoring", "Shape", "attend", "choose", "chosen", "is_plain", "offering", "using"]


@dc.dataclass(slots=True)
class Scoring:
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


def is_plain(mask: Mask, q: TokenLayout, k: TokenLayout) -> bool:
    """Whether the mask over these tokens is 'all', or top-left causal, and nothing else: known without looking."""
    if q.start is None or k.start != 0:
        return False
    if mask.flag() == "causal":  # one query at the end sees every key
        return (q.start == 0 and q.n == k.n) or (q.n == 1 and q.start == k.n - 1)
    return mask.flag() == "all"


def attend(
    q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, q_layout: TokenLayout, k_layout: TokenLayout, needs: frozenset[str]
) -> Tensor:
    """Attention of q over k, v: (…, n, heads, head).

    Shapes: q (…, n, heads, head), k and v (…, m, kv_heads, head); `…` is batch, or nothing for a flat batch.
    """
    backend, plain = chosen(q, scoring, q_layout, k_layout, needs)
    seen = None
    if backend.dense:
        seen = scoring.mask.flag() if plain and backend.flags else dense(scoring.mask, q_layout, k_layout, scoring.heads)
    out = backend.run(q.transpose(-3, -2), k.transpose(-3, -2), v.transpose(-3, -2), scoring, q_layout, k_layout, seen)
    return out.transpose(-3, -2)


def chosen(
    q: Tensor, scoring: Scoring, q_layout: TokenLayout, k_layout: TokenLayout, needs: frozenset[str]
) -> tuple[Backend, bool]:
    """The backend, and whether the mask is plain: asked by every layer, answered once a step for those that ask alike."""
    if torch.compiler.is_compiling():
        return _look(q, scoring, q_layout, k_layout, needs | {"compile"})
    key = ("backend", scoring.mask.key, scoring.bias is None, needs, q.shape, FORCED[-1] if FORCED else None)
    return k_layout.once_for(q_layout, key, _look, q, scoring, q_layout, k_layout, needs)


def _look(
    q: Tensor, scoring: Scoring, q_layout: TokenLayout, k_layout: TokenLayout, needs: frozenset[str]
) -> tuple[Backend, bool]:
    plain = scoring.bias is None and is_plain(scoring.mask, q_layout, k_layout)
    *rows, n, heads, head = q.shape
    # the tiles are looked for only where skipping some could pay; if so, the kernel finds them ready
    worth = not plain and n >= 4 * attend_tiled.TILE and "compile" not in needs
    touched = attend_tiled.touched(scoring, q_layout, k_layout) if worth else n * k_layout.n
    return choose(needs, Shape(prod(rows), n, k_layout.n, heads, head, plain, touched)), plain
