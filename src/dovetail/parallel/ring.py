"""Ring attention as a view. Keys and values go round the ranks of a split sequence; a rank attends to one chunk at a time.

    step s, rank r:   attends to chunk (r − s) mod ranks, while the next one arrives from rank r − 1
    merge             lse = log Σ_c e^(lse_c),      out = Σ_c e^(lse_c − lse) · out_c
    backward          k, v go round again, and dk, dv with them:  p = e^(s − lse),  dv += pᵀ g,  ds = p ∘ (g vᵀ − Σ g∘out)
                      The last step sends the gradients of a chunk to the rank that it belongs to.

A rank holds its own chunk, the chunk that it attends to and the one that arrives, in the backward pass too: three however many
ranks there are. `GatherView` holds all of them. The token layouts of all chunks, a few integers per token, are gathered once
per step.

Chunks that the mask hides are passed on without being attended to. With a causal mask and contiguous chunks, rank r attends to
r + 1 chunks, so the last rank determines the time of a step. Masks read order and document, so that other assignments of tokens
to ranks would be valid; `split_ctx` makes contiguous chunks, because recurrent state and expert capacity follow their order.

A mixer that reads all entries itself (`entries`, `append_blocks`: MLA, NSA, Linformer …), and a listener to the probs, get
those of all chunks by all-gather, as from `GatherView`.        Liu et al. 2023 (Ring Attention); Milakov & Gimelshein 2018
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from dovetail.nn.layout import TokenLayout
from dovetail.nn.module import at_least_fp32
from dovetail.nn.view import KV, Edit, Entries, Scoring
from dovetail.ops.attend_sets import attend_sets, merged
from dovetail.ops.attend_tiled import Work, attend_tiles, tiles_backward

if TYPE_CHECKING:
    from dovetail.parallel.context import GatherView


class RingView:
    """The attention view of rows whose chunks are on several ranks; `gathers` is that of what cannot go round."""

    def __init__(self, gathers: GatherView) -> None:
        self.gathers, self.group = gathers, gathers.group
        self.layouts: tuple[TokenLayout, ...] = ()
        self.own: TokenLayout | None = None

    def append(self, layout: TokenLayout, *new: Tensor) -> RingEntries:
        """Take the entries of this chunk (…, n, *axes); return what attends to those of all chunks."""
        return RingEntries(self, layout, new)

    def append_blocks(self, layout: TokenLayout, *new: Tensor) -> KV:
        """All-gather blocks, as `GatherView` does."""
        return self.gathers.append_blocks(layout, *new)

    def stored(self) -> KV:
        """Refuse: nothing came before."""
        return self.gathers.stored()

    def chunk_layouts(self, layout: TokenLayout) -> tuple[TokenLayout, ...]:
        """The layouts of the chunks of all ranks, computed once for all layers. They are cached here, not in the layout: they
        cache masks for it, and a reference cycle would keep both alive."""
        if self.own is not layout:
            rank, ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
            whole = self.gathers.whole_layout(layout)
            self.layouts = tuple(layout if r == rank else whole.cut(ranks, r) for r in range(ranks))
            self.own = layout
        return self.layouts


class RingEntries:
    """The keys and values of this chunk, which go round the ranks to be attended to."""

    def __init__(self, view: RingView, layout: TokenLayout, tensors: tuple[Tensor, ...]) -> None:
        self.view, self.layout, self.tensors = view, layout, tensors

    def entries(self) -> Entries:
        """All-gather the entries (…, m, *axes) of all chunks, and return their layout."""
        return self._gathered().entries()

    def attend(self, layout: TokenLayout, q: Tensor, scoring: Scoring, edit: Edit | None = None) -> Tensor:
        """Attention of q (…, n, heads, head), tokens of `layout`, over the keys of all chunks."""
        if dist.get_world_size(self.view.group) == 1 or (edit is not None and not edit.scales):
            return self._gathered().attend(layout, q, scoring, edit)
        k, v = self.tensors
        if scoring.on_read is not None:  # every key is rotated by its own rank, before it leaves
            k = scoring.on_read(k, self.layout)
        chunks = self.view.chunk_layouts(self.layout)
        q, k, v = (x.transpose(-3, -2) for x in (q, k, v))
        return attend_sets(self._ring, q, k, v, scoring, edit, layout, *chunks).transpose(-3, -2)

    def _ring(
        self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, edit: Edit | None, layout: TokenLayout, *chunks: TokenLayout
    ) -> tuple[Tensor, Tensor]:
        works = tuple(Work.of(scoring, layout, chunk, edit) for chunk in chunks)
        return _Ring.apply(q, k, v, works, self.view.group, *scoring.tables)  # type: ignore[return-value]

    def _gathered(self) -> KV:
        return self.view.gathers.append(self.layout, *self.tensors)


class Transfer(NamedTuple):
    """Tensors that are on their way to the next rank, and those that arrive from the previous one."""

    leaving: Sequence[Tensor]  # alive until they have left
    arriving: list[Tensor]
    requests: list[dist.Work]

    def wait(self) -> list[Tensor]:
        """Return what has arrived."""
        for request in self.requests:
            request.wait()
        return self.arriving


def pass_on(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> Transfer:
    """Send contiguous tensors to the next rank and receive those of the previous one, without waiting."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    arriving = [torch.empty_like(x) for x in tensors]
    sends = [dist.P2POp(dist.isend, x, group=group, group_peer=(rank + 1) % ranks) for x in tensors]
    receives = [dist.P2POp(dist.irecv, x, group=group, group_peer=(rank - 1) % ranks) for x in arriving]
    return Transfer(tensors, arriving, dist.batch_isend_irecv([*sends, *receives]))


def added(arrived: Sequence[Tensor], own: Sequence[Tensor]) -> list[Tensor]:
    """The gradients of a chunk from the ranks before this one, plus those from this one."""
    return [x.add_(more) for x, more in zip(arrived, own, strict=True)]


class _Ring(torch.autograd.Function):
    """q (rows, kv_heads, shared, n, head), k, v (rows, kv_heads, m, head) of this chunk, the work of each chunk -> z like q,
    lse (rows, kv_heads, shared, n) over all chunks."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, works: Sequence[Work], group: dist.ProcessGroup, *tables: Tensor
    ) -> tuple[Tensor, Tensor]:
        exact = q.to(at_least_fp32(q.dtype))  # sums over chunks are rounded once, at the end
        rank, ranks = dist.get_rank(group), len(works)
        own = chunk = [_turned(x).contiguous() for x in (k, v)]
        out, lse = None, None
        for step in range(ranks):
            transfer = pass_on(chunk, group) if step < ranks - 1 else None
            work = works[(rank - step) % ranks]
            if out is None or lse is None:
                out, lse = attend_tiles(exact, *map(_turned, chunk), work, tables)
            elif not work.empty:
                out, lse = merged(out, lse, *attend_tiles(exact, *map(_turned, chunk), work, tables))
            if transfer is not None:
                chunk, transfer = transfer.wait(), None  # frees the chunk that has left
        assert out is not None
        assert lse is not None
        out = out.to(q.dtype)
        ctx.save_for_backward(q, *own, out, lse, *tables)
        ctx.set_materialize_grads(False)
        ctx.works, ctx.group = works, group
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor | None, g_lse: Tensor | None) -> Any:  # type: ignore[override]
        q, k, v, out, lse, *tables = ctx.saved_tensors
        works, group = ctx.works, ctx.group
        learned = [i for i in range(len(tables)) if ctx.needs_input_grad[5 + i]]
        rank, ranks = dist.get_rank(group), len(works)
        chunk, dq, sent = [k, v], None, None
        dtables: list[Tensor | None] = [None] * len(tables)
        for step in range(ranks):
            transfer = pass_on(chunk, group) if step < ranks - 1 else None
            work, own = works[(rank - step) % ranks], list[Tensor]()
            if step == 0 or not work.empty:
                more = tiles_backward((q, *map(_turned, chunk), out, lse, *tables), g, g_lse, work, learned)
                dq, dtables = _plus(dq, more.q), [_plus(*pair) for pair in zip(dtables, more.tables, strict=True)]
                own = [_turned(x) for x in (more.k, more.v)]
            if sent is not None:
                arrived, sent = sent.wait(), None
                own = added(arrived, own) if own else arrived
            sent = pass_on(own, group)
            if transfer is not None:
                chunk, transfer = transfer.wait(), None  # frees the chunk that has left
        assert dq is not None
        assert sent is not None
        dk, dv = map(_turned, sent.wait())
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, *dtables


def _turned(x: Tensor) -> Tensor:
    """(rows, kv_heads, m, head), as kernels read it, from (rows, m, kv_heads, head), as it is stored and sent; and back."""
    return x.transpose(1, 2)


def _plus(total: Tensor | None, more: Tensor | None) -> Tensor | None:
    """The sum of the gradients so far and those from one chunk more; None where no gradient is needed."""
    return more if total is None or more is None else total.add_(more)
