"""Tiled attention: online softmax over the tiles a mask touches, forward and backward; memory grows as n, not n².

For each tile of queries, pieces of the keys it touches one after the other, with a running maximum m and a running sum l:

    s = cap(q kᵀ · scale) + bias      m' = max(m, max s)      o ← o·e^(m−m') + e^(s−m') v      l ← l·e^(m−m') + Σ e^(s−m')

then z = o / l and lse = m + log l. Backward recomputes s piece by piece: p = e^(s − lse), dv = pᵀg, ds = p ∘ (g vᵀ − Δ) with
Δ = Σ g∘z − g_lse. A learned sink s₀ only rescales: z · σ(lse − s₀). Biases are made piece by piece and their tables get
gradients. Beside the results only a few pieces of scores exist at any time, so the workspace does not grow with n.

Shapes: q (…, heads, n, head), k, v (…, kv_heads, m, head). Query heads that share a key head lie side by side in one matmul:
q (rows, kv_heads, shared, n, head), in a tile (rows, kv_heads, shared·n, head).
Milakov & Gimelshein 2018; Rabe & Staats 2021; Dao 2023.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dovetail.core.at import At
from dovetail.core.module import wide
from dovetail.ops.mask import Run, allowed, plan

if TYPE_CHECKING:
    from dovetail.ops.attend import Rule, Shape

OFFERS = frozenset({"bias", "bias_grad", "softcap", "sink"})
TILE = 64  # tokens a tile, of queries and of keys
PIECE = 512  # keys looked at in one step at most: bounds the workspace
KNOWN = 16  # tiles of a relative mask that are remembered


def cost(shape: Shape, needs: frozenset[str]) -> float:
    """Nanoseconds, roughly: dearer a score than the fused kernel, but only for scores the mask touches."""
    touched = shape.keys if shape.plain or shape.reach is None else min(shape.keys, shape.reach + 2 * TILE)
    tiles = -(-shape.queries // TILE)
    return 250_000.0 * tiles + 9.0 * shape.rows * shape.heads * shape.queries * touched


def run(q: Tensor, k: Tensor, v: Tensor, rule: Rule, qa: At, ka: At, seen: object = None) -> Tensor:
    """(…, heads, n, head), touching only the tiles that the mask touches."""
    if q.dim() == 3:
        return _attend(q[None], k[None], v[None], rule, qa, ka)[0]
    if rule.mask.regroup() > 1 and qa.start is None:  # the rows are regrouped each in its own way
        each = ((q[i : i + 1], k[i : i + 1], v[i : i + 1], rule, _row(qa, i), _row(ka, i)) for i in range(q.shape[0]))
        return torch.cat([_attend(*row) for row in each])
    return _attend(q, k, v, rule, qa, ka)


def _row(at: At, i: int) -> At:
    return At(at.coords[i], at.order[i], at.seg[i])


def _attend(q: Tensor, k: Tensor, v: Tensor, rule: Rule, qa: At, ka: At) -> Tensor:
    shared = q.shape[1] // k.shape[1]
    out, lse = _Tiled.apply(q.unflatten(1, (-1, shared)), k, v, Work.of(rule, qa, ka), *rule.tables)  # type: ignore[misc]
    out, lse = out.flatten(1, 2), lse.flatten(1, 2)
    if rule.sink is not None:
        out = out * torch.sigmoid(lse - rule.sink[:, None].to(lse.dtype))[..., None].to(out.dtype)
    return out


# -- which tokens are looked at together -----------------------------------------------------------------------------

Where = slice | Tensor  # tokens side by side, or any tokens by their index


def _take(x: Tensor, where: Where) -> Tensor:
    """The entries (…, tokens, head) of some tokens."""
    return x[..., where, :] if isinstance(where, slice) else x.index_select(-2, where)


def _add(x: Tensor, where: Where, more: Tensor) -> None:
    """Add to the entries (…, tokens, head) of some tokens."""
    if isinstance(where, slice):
        x[..., where, :].add_(more)
    else:
        x.index_add_(-2, where, more)


def _put(x: Tensor, where: Where, new: Tensor) -> None:
    """Set the entries (…, tokens, head) of some tokens."""
    if isinstance(where, slice):
        x[..., where, :] = new
    else:
        x.index_copy_(-2, where, new)


class Piece(NamedTuple):
    """Keys looked at in one step, and those columns of its scores that have to be masked, with the run they stand for."""

    keys: Where
    partial: list[tuple[slice, Run]]


class Tile(NamedTuple):
    """Some queries from number `begin` on, where they stand, and the pieces of keys they touch."""

    begin: int
    queries: Where
    at: At
    pieces: list[Piece]


class Order(NamedTuple):
    """Tokens in the order they are tiled: those of one residue modulo `step` side by side, so that tiles are full or empty."""

    at: At
    index: Tensor
    numbers: list[int]  # the same index
    step: int

    def where(self, place: slice | Tensor) -> Where:
        """The tokens at some places; within a residue they lie evenly, which a slice can say."""
        if isinstance(place, slice):
            first, last = self.numbers[place.start], self.numbers[place.stop - 1]
            if last - first == (place.stop - place.start - 1) * self.step:
                return slice(first, last + 1, self.step)
        return self.index[place]


@dc.dataclass
class Work:
    """What the kernel knows beside tensors."""

    rule: Rule
    qa: At
    ka: At
    runs: list[list[Run]]  # of each tile of queries
    q_order: Order | None  # None: tokens are tiled as they lie
    k_order: Order | None
    known: dict[Any, Tensor] | None  # what equal tiles of a relative mask let through; None: no two need be equal

    @staticmethod
    def of(rule: Rule, qa: At, ka: At) -> Work:
        """The plan for these tokens, made once a step for all layers with an equal mask."""
        step, heads = rule.mask.regroup(), len(rule.heads)
        if step > 1 and qa.n > 1:
            q_order, k_order = _regrouped(qa, step), _regrouped(ka, step)
            runs = plan(rule.mask, q_order.at, k_order.at, heads, TILE, TILE)
            return Work(rule, _one_row(qa), _one_row(ka), runs, q_order, k_order, None)
        runs = plan(rule.mask, qa, ka, heads, TILE, TILE)
        even = rule.mask.relative() and qa.start is not None and ka.start is not None
        known = ka.once_for(qa, ("tiles", rule.mask.key, heads), dict) if even else None
        return Work(rule, _one_row(qa), _one_row(ka), runs, None, None, known)

    def tiles(self) -> Iterator[Tile]:
        """Each tile of queries."""
        for i, runs in enumerate(self.runs):
            place = slice(i * TILE, min((i + 1) * TILE, self.qa.n))
            queries = place if self.q_order is None else self.q_order.where(place)
            yield Tile(place.start, queries, self.qa.pick(queries), list(self.pieces(runs)))

    def pieces(self, runs: list[Run]) -> Iterator[Piece]:
        """The runs of one tile packed into pieces of at most PIECE keys, however far apart they lie."""
        packed, room = [], PIECE
        for run in runs:
            begin = run.begin
            while begin < run.end:
                packed.append(run._replace(begin=begin, end=min(run.end, begin + room)))
                room -= packed[-1].end - begin
                begin = packed[-1].end
                if room == 0:
                    yield self.piece(packed)
                    packed, room = [], PIECE
        if packed:
            yield self.piece(packed)

    def piece(self, runs: list[Run]) -> Piece:
        """Some runs looked at together."""
        partial, begin = [], 0
        for run in runs:
            end = begin + run.end - run.begin
            if not run.full:
                partial.append((slice(begin, end), run))
            begin = end
        return Piece(self.keys(runs), partial)

    def keys(self, runs: list[Run]) -> Where:
        """The tokens of some runs."""
        if all(a.end == b.begin for a, b in pairwise(runs)):
            place: Where = slice(runs[0].begin, runs[-1].end)
        else:
            place = torch.cat([torch.arange(run.begin, run.end, device=self.ka.order.device) for run in runs])
        return place if self.k_order is None else self.k_order.where(place)

    def shut(self, tile: Tile, run: Run) -> Tensor:
        """(…, 1 or heads, n, m) −∞ where a query may not see a key of the run, else 0."""
        kind = (tile.begin - run.begin, tile.at.n, run.end - run.begin)
        if self.known is not None and kind in self.known:
            return self.known[kind]
        look = self.rule.mask.visible if run.alone else partial(allowed, self.rule.mask)
        made = torch.where(look(tile.at, self.ka.pick(self.keys([run])), self.rule.heads), 0.0, -torch.inf)
        if self.known is not None and len(self.known) < KNOWN:
            self.known[kind] = made
        return made

    def bias(self, tile: Tile, piece: Piece, tables: tuple[Tensor, ...]) -> Tensor | None:
        """(…, heads, n, m) added to the scores of one piece."""
        return None if self.rule.bias is None else self.rule.bias(tile.at, self.ka.pick(piece.keys), *tables)

    def scores(self, query: Tensor, key: Tensor, tile: Tile, piece: Piece, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """(rows, kv_heads, shared, n, m) scores of one piece with −∞ where not allowed; tanh of the capped scores."""
        rows, groups, _, _ = query.shape
        shape = (rows, groups, -1, tile.at.n, key.shape[-2])
        scores = (query @ key.transpose(-1, -2)).to(wide(query.dtype)).mul_(self.rule.scale).view(shape)
        capped = None
        if self.rule.softcap is not None:
            capped = torch.tanh(scores / self.rule.softcap)
            scores = self.rule.softcap * capped
        if bias is not None:
            scores += _by_group(bias, groups)
        for columns, run in piece.partial:
            scores[..., columns].add_(_by_group(self.shut(tile, run), groups))  # far cheaper than masked_fill_
        return scores, capped


def _one_row(at: At) -> At:
    """Where all rows stand alike one of them says it all, and masks are made for one row only."""
    if at.start is None or at.order.dim() == 1:
        return at
    return At(at.coords[:1], at.order[:1], at.seg[:1], start=at.start)


def _regrouped(at: At, step: int) -> Order:
    """The tokens sorted by residue; where rows differ, by those of the first."""

    def look() -> Order:
        index = (at.order % step).view(-1, at.n)[0].argsort(stable=True)
        return Order(at.pick(index), index, index.tolist(), step)

    return at.once(("regrouped", step), look)


def _by_group(x: Tensor, groups: int) -> Tensor:
    """(…, 1 or heads, n, m) -> (…, 1 or kv_heads, 1 or shared, n, m)."""
    return x.unsqueeze(-3) if x.shape[-3] == 1 else x.unflatten(-3, (groups, -1))


# -- the kernel ------------------------------------------------------------------------------------------------------


class _Tiled(torch.autograd.Function):
    """q (rows, kv_heads, shared, n, head), k, v (rows, kv_heads, m, head) -> z like q, lse (rows, kv_heads, shared, n)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, work: Work, *tables: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        rows, groups, shared, n, _ = q.shape
        out = q.new_zeros(rows, n, groups, shared, v.shape[-1]).permute(0, 2, 3, 1, 4)  # token by token, as the stream lies
        # of a row that sees nothing: hopeless but finite, so that σ(lse − sink) is 0 with gradient 0, not NaN
        lowest = torch.finfo(wide(q.dtype)).min / 4
        lse = q.new_full(q.shape[:-1], lowest, dtype=wide(q.dtype))
        for tile in work.tiles():
            query = _take(q, tile.queries).flatten(2, 3)
            top = lse.new_full((rows, groups, shared, tile.at.n, 1), lowest)
            total = torch.zeros_like(top)
            acc = lse.new_zeros(*query.shape[:-1], v.shape[-1])
            for piece in tile.pieces:
                key, value = _take(k, piece.keys), _take(v, piece.keys)
                scores, _ = work.scores(query, key, tile, piece, work.bias(tile, piece, tables))
                peak = torch.maximum(top, scores.amax(-1, keepdim=True))
                shrink, top = torch.exp(top - peak), peak
                p = scores.sub_(peak).exp_()
                total = total * shrink + p.sum(-1, keepdim=True)
                acc = acc * shrink.flatten(2, 3) + p.to(v.dtype).flatten(2, 3) @ value
            total = total.clamp_min_(1.0)  # the greatest score counts 1, so only a row that sees nothing has less
            _put(out, tile.queries, (acc / total.flatten(2, 3)).to(out.dtype).unflatten(2, (shared, -1)))
            _put(lse[..., None], tile.queries, top + total.log())
        ctx.save_for_backward(q, k, v, out, lse, *tables)
        ctx.set_materialize_grads(False)
        ctx.work = work
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor | None, g_lse: Tensor | None) -> Any:  # type: ignore[override]
        q, k, v, out, lse, *tables = ctx.saved_tensors
        work: Work = ctx.work
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        learned = [i for i in range(len(tables)) if ctx.needs_input_grad[4 + i]]
        dtables = [torch.zeros_like(t) if i in learned else None for i, t in enumerate(tables)]
        g = torch.zeros_like(out) if g is None else g
        for tile in work.tiles():
            query, grad = _take(q, tile.queries).flatten(2, 3), _take(g, tile.queries)
            level = _take(lse[..., None], tile.queries)
            delta = (grad * _take(out, tile.queries)).sum(-1, keepdim=True, dtype=lse.dtype)
            if g_lse is not None:
                delta -= _take(g_lse[..., None], tile.queries)
            grad, dquery = grad.flatten(2, 3), torch.zeros_like(query)
            for piece in tile.pieces:
                key, value = _take(k, piece.keys), _take(v, piece.keys)
                with torch.enable_grad():
                    free = tuple(t.detach().requires_grad_(i in learned) for i, t in enumerate(tables))
                    bias = work.bias(tile, piece, free)
                scores, capped = work.scores(query, key, tile, piece, None if bias is None else bias.detach())
                p = scores.sub_(level).exp_()
                _add(dv, piece.keys, p.to(v.dtype).flatten(2, 3).transpose(-1, -2) @ grad)
                ds = (grad @ value.transpose(-1, -2)).view_as(p).sub(delta).mul_(p)
                if bias is not None and learned:
                    each = torch.autograd.grad(bias, [free[i] for i in learned], ds.flatten(1, 2).sum_to_size(bias.shape))
                    for i, d in zip(learned, each, strict=True):
                        dtables[i] += d  # type: ignore[operator]
                if capped is not None:
                    ds = ds * (1 - capped * capped)
                ds = ds.to(q.dtype).flatten(2, 3)
                dquery += ds @ key
                _add(dk, piece.keys, ds.transpose(-1, -2) @ query)
            _put(dq, tile.queries, dquery.unflatten(2, (q.shape[2], -1)))
        return dq.mul_(work.rule.scale), dk.mul_(work.rule.scale), dv, None, *dtables
