"""Tiled attention: online softmax over the tiles a mask touches, forward and backward; memory grows as n, not n².

For each tile of queries, runs of keys one after the other, with a running maximum m and a running sum l:

    s = cap(q kᵀ · scale) + bias      m' = max(m, max s)      o ← o·e^(m−m') + e^(s−m') v      l ← l·e^(m−m') + Σ e^(s−m')

then z = o / l and lse = m + log l. Backward recomputes s tile by tile: p = e^(s − lse), dv = pᵀg, ds = p ∘ (g vᵀ − Δ + g_lse)
with Δ = Σ g∘z. A learned sink s₀ only rescales: z · σ(lse − s₀). Biases are made tile by tile and their tables get gradients.

Shapes: q (…, heads, n, head), k, v (…, kv_heads, m, head). Query heads that share a key head lie side by side in one matmul:
q (rows, kv_heads, shared, n, head). Milakov & Gimelshein 2018; Rabe & Staats 2021; Dao 2023.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dovetail.core.at import At
from dovetail.core.module import wide
from dovetail.ops.mask import allowed, plan

if TYPE_CHECKING:
    from dovetail.ops.attend import Rule, Shape

OFFERS = frozenset({"bias", "bias_grad", "softcap", "sink"})
TILE = 64  # tokens a tile, of queries and of keys
RUN = 512  # keys looked at in one step at most: bounds the workspace


def cost(shape: Shape, needs: frozenset[str]) -> float:
    """Nanoseconds, roughly: dearer a score than the fused kernel, but only for scores the mask touches."""
    touched = shape.keys if shape.plain or shape.reach is None else min(shape.keys, shape.reach + 2 * TILE)
    tiles = -(-shape.queries // TILE)
    return 250_000.0 * tiles + 9.0 * shape.rows * shape.heads * shape.queries * touched


def run(q: Tensor, k: Tensor, v: Tensor, rule: Rule, qa: At, ka: At, seen: object = None) -> Tensor:
    """(…, heads, n, head), touching only the tiles that the mask touches."""
    flat = q.dim() == 3
    if flat:
        q, k, v = q[None], k[None], v[None]
    step = rule.mask.regroup()
    back = None
    if step > 1 and qa.n > 1:  # tokens of one residue become neighbours, so that their tiles are full
        (q, qa, back), (k, ka, _), (v, _, _) = _regroup(q, qa, step), _regroup(k, ka, step), _regroup(v, ka, step)
    shared = q.shape[1] // k.shape[1]
    out, lse = _Tiled.apply(q.unflatten(1, (-1, shared)), k, v, _Static(rule, qa, ka), *rule.tables)  # type: ignore[misc]
    out, lse = out.flatten(1, 2), lse.flatten(1, 2)
    if rule.sink is not None:
        out = out * torch.sigmoid(lse - rule.sink[:, None].to(lse.dtype))[..., None].to(out.dtype)
    if back is not None:
        out = out.gather(-2, back[:, None, :, None].expand_as(out))
    return out[0] if flat else out


def _regroup(x: Tensor, at: At, step: int) -> tuple[Tensor, At, Tensor]:
    """Tokens sorted by order mod step (stably), and the index that puts them back."""
    rows = (at.order % step).expand(x.shape[0], -1)
    index = rows.argsort(dim=-1, stable=True)
    row = None if at.row is None else at.row[index[0]]
    order, seg = (t.expand(x.shape[0], -1).gather(-1, index) for t in (at.order, at.seg))
    coords = at.coords.expand(x.shape[0], -1, -1).gather(-2, index[..., None].expand(-1, -1, at.coords.shape[-1]))
    return x.gather(-2, index[:, None, :, None].expand_as(x)), At(coords, order, seg, row), index.argsort(-1)


@dc.dataclass
class _Static:
    """What the kernel knows beside tensors."""

    rule: Rule
    qa: At
    ka: At

    def tiles(self) -> Iterator[tuple[slice, list[tuple[slice, bool]]]]:
        """Each tile of queries with the runs of keys it touches, none longer than RUN."""
        heads, mask = self.rule.heads, self.rule.mask
        first = int(heads[0]) if mask.by_head() else 0
        for i, runs in enumerate(plan(mask, self.qa, self.ka, len(heads), TILE, TILE, first)):
            pieces = [
                (slice(begin, min(begin + RUN, run.end)), run.full) for run in runs for begin in range(run.begin, run.end, RUN)
            ]
            yield slice(i * TILE, min((i + 1) * TILE, self.qa.n)), pieces

    def scores(
        self, q: Tensor, k: Tensor, qs: slice, ks: slice, full: bool, bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """(rows, kv_heads, shared, n, m) scores of one piece with −∞ where not allowed; tanh of the capped scores."""
        rows, groups, shared, n, _ = q.shape
        scores = (
            (q.flatten(2, 3) @ k.transpose(-1, -2)).to(wide(q.dtype)).mul_(self.rule.scale).view(rows, groups, shared, n, -1)
        )
        capped = None
        if self.rule.softcap is not None:
            capped = torch.tanh(scores / self.rule.softcap)
            scores = self.rule.softcap * capped
        if bias is not None:
            scores = scores + _by_group(bias, groups, shared)
        if not full:
            seen = allowed(self.rule.mask, self.qa.pick(qs), self.ka.pick(ks), self.rule.heads)
            scores = scores.masked_fill_(~_by_group(seen, groups, shared), -torch.inf)
        return scores, capped

    def bias(self, qs: slice, ks: slice, tables: tuple[Tensor, ...]) -> Tensor | None:
        """(…, heads, n, m) of one piece."""
        if self.rule.bias is None:
            return None
        return self.rule.bias(self.qa.pick(qs), self.ka.pick(ks), *tables)


def _by_group(x: Tensor, groups: int, shared: int) -> Tensor:
    """(…, 1 or heads, n, m) -> (…, 1 or kv_heads, 1 or shared, n, m)."""
    return x.unsqueeze(-3) if x.shape[-3] == 1 else x.unflatten(-3, (groups, shared))


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, static: _Static, *tables: Tensor) -> tuple[Tensor, Tensor]:
        rows, groups, shared, n, _ = q.shape
        out = q.new_zeros(rows, groups, shared, n, v.shape[-1])
        lse = q.new_full((rows, groups, shared, n), -torch.inf, dtype=wide(q.dtype))
        for qs, pieces in static.tiles():
            query = q[..., qs, :]
            acc: Tensor | None = None
            top = total = lse[..., qs]
            for ks, full in pieces:
                scores, _ = static.scores(query, k[:, :, ks], qs, ks, full, static.bias(qs, ks, tables))
                peak = scores.amax(-1) if acc is None else torch.maximum(top, scores.amax(-1))
                safe = peak.masked_fill(peak == -torch.inf, 0.0)  # a row that has seen nothing yet
                p = scores.sub_(safe[..., None]).exp_()
                part = (p.to(v.dtype).flatten(2, 3) @ v[:, :, ks]).view(*p.shape[:-1], -1)
                if acc is None:
                    acc, total = part.to(lse.dtype), p.sum(-1)
                else:
                    shrink = torch.exp(top - safe)
                    acc, total = acc * shrink[..., None] + part, total * shrink + p.sum(-1)
                top = peak
            if acc is not None:
                some = total > 0
                out[..., qs, :] = (acc / total.masked_fill(~some, 1.0)[..., None]).to(out.dtype)
                lse[..., qs] = torch.where(some, top + total.masked_fill(~some, 1.0).log(), -torch.inf)
        # an empty row gets a finite, hopeless lse: σ(lse − sink) is then 0 with gradient 0, not NaN
        lse = lse.masked_fill_(lse == -torch.inf, torch.finfo(lse.dtype).min / 4)
        ctx.save_for_backward(q, k, v, out, lse, *tables)
        ctx.static = static
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor, g_lse: Tensor) -> Any:
        q, k, v, out, lse, *tables = ctx.saved_tensors
        static: _Static = ctx.static
        rule = static.rule
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        learned = [i for i in range(len(tables)) if ctx.needs_input_grad[4 + i]]
        dtables: list[Tensor | None] = [torch.zeros_like(t) if i in learned else None for i, t in enumerate(tables)]
        delta = (g * out).sum(-1, dtype=lse.dtype) - g_lse
        for qs, pieces in static.tiles():
            query, grad = q[..., qs, :], g[..., qs, :].flatten(2, 3)
            for ks, full in pieces:
                key, value = k[:, :, ks], v[:, :, ks]
                with torch.enable_grad():
                    free = tuple(t.detach().requires_grad_(i in learned) for i, t in enumerate(tables))
                    bias = static.bias(qs, ks, free)
                scores, capped = static.scores(query, key, qs, ks, full, None if bias is None else bias.detach())
                p = scores.sub_(lse[..., qs, None]).exp_()
                flat = p.to(v.dtype).flatten(2, 3)
                dv[:, :, ks] += flat.transpose(-1, -2) @ grad
                ds = (grad @ value.transpose(-1, -2)).view_as(p).sub(delta[..., qs, None]).mul_(p)
                if bias is not None and learned:
                    with torch.enable_grad():  # even a view needs it to lead back to the tables
                        whole = _by_group(bias, *q.shape[1:3]).expand_as(ds)
                    for i, d in zip(learned, torch.autograd.grad(whole, [free[i] for i in learned], ds), strict=True):
                        dtables[i] = d if dtables[i] is None else dtables[i] + d  # type: ignore[operator]
                if capped is not None:
                    ds = ds * (1 - capped * capped)
                ds = ds.to(q.dtype).mul_(rule.scale).flatten(2, 3)
                dq[..., qs, :] += (ds @ key).view_as(query)
                dk[:, :, ks] += ds.transpose(-1, -2) @ query.flatten(2, 3)
        return dq, dk, dv, None, *dtables
