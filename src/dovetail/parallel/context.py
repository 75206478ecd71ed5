"""Sequence parallelism as a view. Each rank holds a contiguous chunk of every row, and the attention view all-gathers the keys
and values of all chunks, with their token layout.

    rank r:  x_r (…, n/ranks, embed) -> q_r, k_r, v_r        view.append(layout_r, k_r, v_r).attend(layout_r, q_r, …)

    ctx = split_ctx(Ctx(layout=layout), spec, group)
    logits_r = model(piece(tokens, group), ctx)

With `split_ctx(…, ring=True)` keys and values go round the ranks instead, and no rank holds those of all chunks
(parallel/ring.py). The view of a recurrent mixer sends its state from rank to rank instead: ranks run in sequence, so this is
correct, not fast.

Masks read order and document only, so a chunk needs no offset. Cross attention reads an encoder output that is whole on every
rank: encode each chunk of the source with `split_ctx(Ctx(layout=source_layout), spec.encoder, group)`, then call
`whole_encoder_output`; or encode the whole source on every rank. `model.loss` is the mean over all labels of the batch on every
rank, with the whole batch's losses of routers: average the gradients over the ranks.        Li et al. 2021 (sequence
parallelism)

The ranks that split the tokens of a batch, for what is a statistic of the whole batch: balance losses, expert capacity.

    data       each rank has other rows           rank 0: rows 0 … b/2 − 1        rank 1: rows b/2 … b − 1
    sequence   each rank has a chunk of every row rank 0: tokens 0 … n/2 − 1      rank 1: tokens n/2 … n − 1

A run sets them as `ctx.ranks.batch`: FSDP by itself (parallel/shard.py), `split_ctx` for a split sequence, or both. The tokens
of the whole batch are ordered row by row. Before the chunk of row i on this rank come

    the chunks of row i on earlier sequence ranks  +  the rows before i on all sequence ranks  +  all rows of earlier data ranks
"""

from __future__ import annotations

import dataclasses as dc
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dovetail.base.errors import SpecError, StateError
from dovetail.nn.ctx import Ctx, Views
from dovetail.nn.groups import Embed, Head, Mixer, Mtp, Scaling
from dovetail.nn.layout import TokenLayout
from dovetail.nn.ranks import Ranks
from dovetail.ops.attend import StoredEntries
from dovetail.parallel.collective import gather, hand_on, joined, receive, total
from dovetail.parallel.ring import RingView
from dovetail.spec.part import Part, walk, walk_spec


class RunRanks(ABC):
    """Ranks that are set in the ctx of every run of a model (`run_with`, parallel/shard.py)."""

    @abstractmethod
    def added_to(self, ctx: Ctx) -> Ctx:
        """Return the ctx with these ranks."""

    def run(self) -> AbstractContextManager[None]:
        """Return the context in which the model runs; by default it needs no preparation."""
        return nullcontext()


@dc.dataclass(frozen=True)
class TokenRanks(RunRanks):
    """The ranks among which the tokens of a batch are split; None where they are not."""

    data: dist.ProcessGroup | None = None
    sequence: dist.ProcessGroup | None = None

    def sum(self, x: Tensor) -> Tensor:
        """Return x summed over all ranks; its gradient is all-reduced too."""
        for group in self._groups():
            x = total(x, group)
        return x

    def counts(self, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Take counts (rows, …) of this rank; return those of all tokens before each of these rows' chunks (rows, …), and those
        of the whole batch (…)."""
        earlier_chunks, rows = _scan(counts, self.sequence)
        earlier_ranks, whole = _scan(rows.sum(0), self.data)
        return earlier_chunks + (rows.cumsum(0) - rows) + earlier_ranks, whole

    def broadcast(self, x: Tensor) -> Tensor:
        """Return the first rank's x."""
        x = x.clone()
        for group in self._groups():
            dist.broadcast(x, group=group, group_src=0)
        return x

    def added_to(self, ctx: Ctx) -> Ctx:
        """Return the ctx with these ranks, beside those that split its sequence.

        A layout without numbers of its documents gets those of the whole batch, of as many rows on every rank: with numbers
        from 0, all ranks would draw the same dropout."""
        before, layout = ctx.ranks.batch, ctx.layout
        sequence = before.sequence if isinstance(before, TokenRanks) else None
        if self.data is not None and not layout.has_samples:
            rows = layout.order.shape[0] if layout.row is None else layout.rows
            layout = layout.numbered(dist.get_rank(self.data) * rows)
        return dc.replace(ctx, layout=layout, ranks=Ranks(ctx.ranks.axes, TokenRanks(self.data, sequence)))

    def _groups(self) -> list[dist.ProcessGroup]:
        return [group for group in (self.data, self.sequence) if group is not None]


def _scan(x: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Return the sum of x over the ranks before this one, and over all ranks."""
    if group is None:
        return torch.zeros_like(x), x
    ranks = joined(x[None], 0, group)
    return ranks[: dist.get_rank(group)].sum(0), ranks.sum(0)


class GatherView:
    """The attention view of rows whose chunks are on several ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def append(self, layout: TokenLayout, *new: Tensor) -> StoredEntries:
        """Take the entries of this chunk (…, n, *axes); return those of all chunks (…, n·ranks, *axes)."""
        dim = layout.order.dim() - 1
        return StoredEntries(self.whole_layout(layout), tuple(gather(values, dim, self.group) for values in new))

    append_blocks = append  # of blocks that end in this chunk, equally many on every rank (document −1 where there is none)

    def whole_layout(self, layout: TokenLayout) -> TokenLayout:
        """The token layout of all chunks, computed once for all layers."""
        return layout.once(("whole row", self.group), lambda: whole_layout(layout, self.group))

    def stored(self) -> StoredEntries:
        """Refuse: nothing came before."""
        raise StateError("there are no keys to attend to: a split sequence has no cache")


class CarryView:
    """The view of a recurrent mixer on rows whose chunks are on several ranks: it receives the state and sends it on."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def read(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """Return x and the recurrent state before this chunk; None on the first rank."""
        return (x, None) if dist.get_rank(self.group) == 0 else receive(x, self.group)

    def write(self, y: Tensor, *new: Tensor) -> Tensor:
        """Send the recurrent state to the next rank; return y."""
        last = dist.get_rank(self.group) == dist.get_world_size(self.group) - 1
        return y if last else hand_on(y, new, self.group)


class SequenceRanks(RunRanks):
    """The ranks that have the other chunks of every row: set in the ctx of every run of a model, whose layout is then that of
    this rank's chunk."""

    def __init__(self, spec: Part, group: dist.ProcessGroup, ring: bool = False) -> None:
        self.views, self.group = split_views(spec, group, ring), group

    def added_to(self, ctx: Ctx) -> Ctx:
        """Return the ctx with the views of a split sequence, and these ranks beside those with other rows."""
        before = ctx.ranks.batch
        rows = before.data if isinstance(before, TokenRanks) else None
        return dc.replace(ctx, views=self.views, ranks=Ranks(ctx.ranks.axes, TokenRanks(rows, self.group)))


def split_ctx(ctx: Ctx, spec: Part, group: dist.ProcessGroup, ring: bool = False) -> Ctx:
    """Return the ctx of this rank's chunk of every row from that of whole rows: its layout and token types, its views, and the
    ranks that hold the other chunks. With `ring`, attention sends keys and values round the ranks (parallel/ring.py)."""
    layout = ctx.layout.cut(dist.get_world_size(group), dist.get_rank(group))
    types = None if ctx.types is None else piece(ctx.types, group)
    views, ranks = split_views(spec, group, ring), TokenRanks(sequence=group)
    return dc.replace(ctx, layout=layout, types=types, views=views, ranks=Ranks(ctx.ranks.axes, ranks))


def split_views(spec: Part, group: dist.ProcessGroup, ring: bool = False) -> Views:
    """Return a view for every self-attending or recurrent mixer, one mapping per layer, for Ctx(views=…)."""
    check_split(spec)
    views: list[dict[str, Any]] = []
    gathers, carries = GatherView(group), CarryView(group)
    attends = RingView(gathers) if ring else gathers
    for path, part, _ in walk(spec):
        stack, _, rest = path.partition(".")
        if stack != "layers":
            continue  # the encoder has views of its own
        index, _, branch = rest.partition(".")
        views += [{} for _ in range(int(index) + 1 - len(views))]
        if isinstance(part, Mixer) and not part.reads_encoder():
            views[int(index)][branch] = carries if part.recurrent else attends
    return views


def check_split(spec: Part) -> None:
    """Raise SpecError for a part that needs a whole row at once."""
    inner = tuple(f"{path}." for path, part in walk_spec(spec) if path and part.group == spec.group)
    for path, part in walk_spec(spec):
        if not path.startswith(inner):  # an encoder may run unsplit
            _refuse(path, part)


def _refuse(path: str, part: Part) -> None:
    if isinstance(part, Head) and part.pools():
        problem, remedy = "gives one answer a row, whose tokens lie on several ranks", "split rows over ranks instead: data"
    elif isinstance(part, Embed) and not part.causal():
        problem, remedy = "makes another number of tokens than it is given", "split rows over ranks instead: data"
    elif isinstance(part, Mtp):
        problem, remedy = "predicts later tokens, which may lie on the next rank", "split rows over ranks instead: data"
    elif isinstance(part, Scaling) and part.varies:
        problem, remedy = "turns by the length of the whole row, which no rank sees", "use a scaling with fixed angles"
    else:
        return
    raise SpecError(path, f"a sequence cannot be split: {part.kind} {problem}", remedy)


def piece(x: Tensor, group: dist.ProcessGroup, dim: int = -1) -> Tensor:
    """Return the chunk of x on this rank; the length must be divisible (pad with document −1)."""
    ranks = dist.get_world_size(group)
    if x.shape[dim] % ranks:
        raise StateError(f"{x.shape[dim]} tokens cannot be cut evenly over {ranks} ranks (pad the rows)")
    return x.chunk(ranks, dim)[dist.get_rank(group)]


def whole_layout(layout: TokenLayout, group: dist.ProcessGroup) -> TokenLayout:
    """Return the token layout of all chunks."""
    lengths = joined(torch.tensor([layout.n], device=layout.order.device), 0, group).tolist()
    if len(set(lengths)) > 1:
        raise StateError(f"the pieces of a row are {lengths} tokens long on the ranks, and must be equal (pad the rows)")
    row = None if layout.row is None else joined(layout.row, 0, group)
    order, seg, sample = (joined(x, -1, group) for x in (layout.order, layout.seg, layout.sample))
    return TokenLayout(joined(layout.coords, -2, group), order, seg, row, sample=sample)


def whole_encoder_output(memory: Tensor, layout: TokenLayout, group: dist.ProcessGroup) -> tuple[Tensor, TokenLayout]:
    """All-gather the encoder output (…, m/ranks, encoder) of each chunk of the source to (…, m, encoder)."""
    return gather(memory, -2, group), whole_layout(layout, group)
