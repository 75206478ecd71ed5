"""attend: softmax attention by the cheapest backend that offers what the call needs.

    z = softmax(cap(q kᵀ · scale) + bias, where allowed) v        q (…, n, heads, head)   k, v (…, m, kv_heads, head)

A backend is a name, a set of offers, a cost and a function. Needs are plain data: those of the part (soft-cap, sink, bias),
and those of the call (dropout, a listener that edits the probs, a compiled graph).
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from dovetail.base.errors import BackendError, StateError
from dovetail.nn.layout import TokenLayout
from dovetail.nn.view import Edit, Entries, Flag, Scoring
from dovetail.ops import attend_flex, attend_ref, attend_tiled, attend_torch
from dovetail.ops.implementation import FORCED, Backend, ProblemSize, using
from dovetail.ops.mask import dense

__all__ = ["BACKENDS", "WHOLE", "StoredEntries", "attend", "choose", "chosen", "is_plain", "offering", "using"]


BACKENDS: list[Backend] = [
    Backend("torch", attend_torch.OFFERS, attend_torch.cost, attend_torch.run, dense=True, flags=True),
    # a Python loop over tiles: on a GPU each tile would be a launch
    Backend("tiled", attend_tiled.OFFERS, attend_tiled.cost, attend_tiled.run, dense=False, devices=("cpu",)),
    Backend("flex", attend_flex.OFFERS, attend_flex.cost, attend_flex.run, dense=True, devices=("cuda",)),
    Backend("reference", attend_ref.OFFERS, attend_ref.cost, attend_ref.run, dense=True),
]


def offering(needs: frozenset[str], device: str = "cpu") -> list[Backend]:
    """The backends that offer all of the needs on a type of device (and are not excluded by `using`)."""
    return [
        backend
        for backend in BACKENDS
        if needs <= backend.offers
        and (not backend.devices or device in backend.devices)
        and (not FORCED or backend.name == FORCED[-1])
    ]


def choose(needs: frozenset[str], shape: ProblemSize, device: str = "cpu") -> Backend:
    """The cheapest backend that offers all of the needs on a type of device: one with flags where the mask is plain."""
    able = able_for(needs, device)
    if len(able) == 1 or (shape.plain and able[0].flags):
        return able[0]
    return min(able, key=lambda backend: backend.cost(shape, needs))


def able_for(needs: frozenset[str], device: str = "cpu") -> list[Backend]:
    """The backends that offer all of the needs on a type of device; at least one."""
    able = offering(needs, device)
    if not able:
        only = f"; only {FORCED[-1]!r} is allowed here" if FORCED else ""
        raise BackendError(f"no attention backend offers all of {sorted(needs)} on {device}{only}")
    return able


def is_plain(flag: Flag | None, q: TokenLayout, k: TokenLayout) -> bool:
    """Whether a mask with this flag over these tokens is exactly 'all' or top-left causal; decided without reading a tensor."""
    if q.start is None or k.start != 0:
        return False
    if flag == "causal":  # one query at the end sees every key
        n, keys = q.order.shape[-1], k.order.shape[-1]
        return (q.start == 0 and n == keys) or (n == 1 and q.start == keys - 1)
    return flag == "all"


def attend(
    q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, q_layout: TokenLayout, k_layout: TokenLayout, edit: Edit | None = None
) -> Tensor:
    """Attention of q over k, v: (…, n, heads, head).

    Shapes: q (…, n, heads, head), k and v (…, m, kv_heads, head); `…` is batch, or nothing for a flat batch.
    """
    if edit is not None and edit.reads is not None:
        observe(q, k, v, scoring, q_layout, k_layout, edit)
        edit = None
    needs = scoring.needs if edit is None else scoring.needs | {edit.need}
    backend, visible = chosen(q, scoring, q_layout, k_layout, needs)
    if visible is None and backend.dense:
        visible = dense(scoring.mask, q_layout, k_layout, scoring.heads)
    out = backend.run(q.transpose(-3, -2), k.transpose(-3, -2), v.transpose(-3, -2), scoring, q_layout, k_layout, visible, edit)
    return out.transpose(-3, -2)


def observe(
    q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, q_layout: TokenLayout, k_layout: TokenLayout, edit: Edit
) -> None:
    """Compute the probs of the queries that a listener asks for, and of no others, by the reference implementation."""
    assert edit.reads is not None
    wanted = edit.reads(q_layout)
    if wanted is not None:
        count = int(wanted.sum(-1).amax())
        if count == 0:
            return
        index = wanted.int().topk(count, -1).indices.sort(-1).values  # a row with fewer has some that are not asked for
        q = q.take_along_dim(index[..., None, None], -3)
        q_layout = TokenLayout.of(q_layout.order.gather(-1, index), q_layout.seg.gather(-1, index))
    visible = dense(scoring.mask, q_layout, k_layout, scoring.heads)
    attend_ref.run(q.transpose(-3, -2), k.transpose(-3, -2), v.transpose(-3, -2), scoring, q_layout, k_layout, visible, edit)


class StoredEntries:
    """Entries, the keys and the values in this order, that are attended to by a kernel."""

    __slots__ = ("layout", "tensors")

    def __init__(self, layout: TokenLayout, tensors: tuple[Tensor, ...]) -> None:
        self.layout, self.tensors = layout, tensors

    def entries(self) -> Entries:
        """The entries (…, m, *axes), and their layout."""
        return self.tensors, self.layout

    def attend(self, layout: TokenLayout, q: Tensor, scoring: Scoring, edit: Edit | None = None) -> Tensor:
        """Attention of q (…, n, heads, head), tokens of `layout`, over them."""
        k, v = self.tensors
        if scoring.on_read is not None:
            k = scoring.on_read(k, self.layout)
        return attend(q, k, v, scoring, layout, self.layout, edit)


class WholeView:
    """The view of a whole pass: the entries are those of its own tokens."""

    def append(self, layout: TokenLayout, *entries: Tensor) -> StoredEntries:
        """Return the entries."""
        return StoredEntries(layout, entries)

    append_blocks = append

    def stored(self) -> StoredEntries:
        """Refuse: nothing came before."""
        raise StateError("there are no keys to attend to (cross attention: call model.encode and put its output in the ctx)")


WHOLE = WholeView()


def chosen(
    q: Tensor, scoring: Scoring, q_layout: TokenLayout, k_layout: TokenLayout, needs: frozenset[str]
) -> tuple[Backend, Flag | None]:
    """The backend, and its flag where that is the mask: computed once per step for all layers with equal needs and shapes."""
    if torch.compiler.is_compiling():  # the first that offers all: a cost would compare symbolic sizes, and break the graph
        backend = able_for(needs | {"compile"}, q.device.type)[0]
        return backend, scoring.flag if backend.flags and is_plain(scoring.flag, q_layout, k_layout) else None
    key = ("backend", scoring.mask.key, scoring.flag, needs, q.shape, FORCED[-1] if FORCED else None)
    return k_layout.once_for(q_layout, key, _choose, q, scoring, q_layout, k_layout, needs)


def _choose(
    q: Tensor, scoring: Scoring, q_layout: TokenLayout, k_layout: TokenLayout, needs: frozenset[str]
) -> tuple[Backend, Flag | None]:
    plain = is_plain(scoring.flag, q_layout, k_layout)
    *rows, n, heads, head = q.shape
    keys = k_layout.order.shape[-1]
    # plan tiles only where skipping some could save time; the kernel then reuses the plan
    device = q.device.type
    can_skip = not plain and n >= 4 * attend_tiled.TILE and device == "cpu"
    touched = attend_tiled.touched(scoring, q_layout, k_layout) if can_skip else n * keys
    backend = choose(needs, ProblemSize(prod(rows), n, keys, heads, head, plain, touched), device)
    return backend, scoring.flag if plain and backend.flags else None
