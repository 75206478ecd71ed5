"""Tilings for the tiled kernel: tiles of queries, and for each tile the keys that it touches, packed into pieces.

    queries  ▏tile▕▏tile▕▏tile▕ …          keys of a tile: run ──── run ── run ───────  ->  ▏piece▕▏piece▕

The keys of one piece need not be neighbors: the runs that a mask touches are gathered, so that pieces are full whether the
mask is dense or sparse. For a strided mask, tokens are sorted by their residue modulo the stride before they are tiled.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from dovetail.nn.groups import Mask
from dovetail.nn.layout import TokenLayout
from dovetail.ops.mask import TileRun, plan, spans

Where = slice | Tensor  # evenly spaced tokens, or any tokens by their index


def take(x: Tensor, where: Where) -> Tensor:
    """The entries (…, tokens, head) of some tokens."""
    return x[..., where, :] if isinstance(where, slice) else x.index_select(-2, where)


def put(x: Tensor, where: Where, new: Tensor) -> None:
    """Set the entries (…, tokens, head) of some tokens."""
    if isinstance(where, slice):
        x[..., where, :] = new
    else:
        x.index_copy_(-2, where, new)


def add(x: Tensor, where: Where, more: Tensor) -> None:
    """Add to the entries (…, tokens, head) of some tokens."""
    if isinstance(where, slice):
        x[..., where, :].add_(more)
    else:
        x.index_add_(-2, where, more)


class TileOrder:
    """The order in which tokens are tiled: unchanged, or sorted by residue modulo `step`, so that the tiles of a strided mask
    are full or empty. All rows use the order of the first."""

    def __init__(self, layout: TokenLayout, step: int) -> None:
        self.step, self.n, self.device = step, layout.n, layout.order.device
        self.index: Tensor | None = None
        self.known: list[int] = []  # the positions in this order, where no tensor needs to be read for them
        if step > 1:
            if layout.start is None:
                self.index = (layout.order % step).view(-1, layout.n)[0].argsort(stable=True)
                self.numbers = self.index.tolist()
            else:  # `plan` traces tensors without values
                self.numbers = sorted(range(layout.n), key=lambda i, start=layout.start: (start + i) % step)
                self.known = [layout.start + i for i in self.numbers]
                self.index = torch.tensor(self.numbers, device=self.device)
            self.layout = layout.pick(self.index)

    def tiled(self, layout: TokenLayout) -> TokenLayout:
        """The layout in this order. An unchanged layout is not stored here: it caches this object, and a reference cycle would
        keep both alive."""
        return layout if self.index is None else self.layout

    def where(self, runs: list[TileRun]) -> Where:
        """The tokens of some runs; a slice where they are evenly spaced."""
        begin, end = runs[0].begin, runs[-1].end
        if any(a.end != b.begin for a, b in pairwise(runs)):
            places = torch.cat([torch.arange(run.begin, run.end, device=self.device) for run in runs])
            return places if self.index is None else self.index[places]
        if self.index is None:
            return slice(begin, end, 1)
        first, last = self.numbers[begin], self.numbers[end - 1]
        even = last - first == (end - begin - 1) * self.step
        return slice(first, last + 1, self.step) if even else self.index[begin:end]


class KeyPiece(NamedTuple):
    """Keys that are processed together for the queries of a tile; the runs of them that need a mask, and the columns of these
    in the scores."""

    tile: int
    queries: Where
    keys: Where
    masked: list[TileRun]
    columns: list[slice]


class Tile(NamedTuple):
    """Some queries, and the pieces of keys that they touch."""

    queries: Where
    pieces: list[KeyPiece]


Loop = Callable[[list[Tile], Callable[[KeyPiece], Hashable]], Iterator[tuple[Tile, Iterable[KeyPiece]]]]
LOOPS: list[Loop] = []  # of a run without values: one tile and one piece of each kind, each counted as often as there are such


def extent(where: Where) -> tuple[int, int]:
    """The number of tokens, and their distance; 0 where they are not evenly spaced."""
    return (len(range(where.start, where.stop, where.step)), where.step) if isinstance(where, slice) else (len(where), 0)


class Tiling:
    """The tiles of `size` queries, and for each the pieces of at most `most` keys that the mask touches."""

    def __init__(self, mask: Mask, q_layout: TokenLayout, k_layout: TokenLayout, heads: int, size: int, most: int) -> None:
        step = mask.regroup() if q_layout.n > 1 else 1
        self.q, self.k = (layout.once(("tokens", step), partial(TileOrder, layout, step)) for layout in (q_layout, k_layout))
        self.size, self.most = size, most
        for tokens in (self.q, self.k):
            if tokens.known:
                spans(tokens.layout, size, step, tokens.known)
        self.runs = plan(mask, self.q.tiled(q_layout), self.k.tiled(k_layout), heads, size, size)
        self.tiles = [self._tile(i, runs) for i, runs in enumerate(self.runs)]

    def touched(self) -> int:
        """The number of scores in the tiles that are computed."""
        return sum((run.end - run.begin) * self.size for runs in self.runs for run in runs)

    def _tile(self, number: int, runs: list[TileRun]) -> Tile:
        queries = self.q.where([TileRun(number * self.size, min((number + 1) * self.size, self.q.n), True)])
        return Tile(queries, [self._piece(number, queries, packed) for packed in self._packed(runs)])

    def _packed(self, runs: list[TileRun]) -> Iterator[list[TileRun]]:
        """Split and pack the runs of one tile into lists of at most `most` keys."""
        packed, room = [], self.most
        for run in runs:
            begin = run.begin
            while begin < run.end:
                packed.append(run._replace(begin=begin, end=min(run.end, begin + room)))
                room -= packed[-1].end - begin
                begin = packed[-1].end
                if room == 0:
                    yield packed
                    packed, room = [], self.most
        if packed:
            yield packed

    def _piece(self, tile: int, queries: Where, runs: list[TileRun]) -> KeyPiece:
        ends = accumulate(run.end - run.begin for run in runs)
        columns = [slice(end - run.end + run.begin, end) for run, end in zip(runs, ends, strict=True) if not run.full]
        return KeyPiece(tile, queries, self.k.where(runs), [run for run in runs if not run.full], columns)
