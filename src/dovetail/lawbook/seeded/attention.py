"""The planted bugs themselves: each a function that stands in for one of ours and does what somebody's code once did.

The name says what goes wrong; `mutants.py` says where it is planted and which law must see it. Those that only bend the right
function keep it at hand under a private name.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.core.group import Fill
from dovetail.core.layout import TokenLayout
from dovetail.core.part import Part
from dovetail.core.weight import State, Weight
from dovetail.core.wire import WireModule
from dovetail.dist import collective, context, shard
from dovetail.model import Model
from dovetail.ops import attend_ref, attend_tiled
from dovetail.parts.ffn.glu import GluModule
from dovetail.parts.mask.near import Causal, Window
from dovetail.parts.mixer.attention import Attention, AttentionModule
from dovetail.parts.norm import RMSNormModule
from dovetail.parts.position.alibi import AlibiModule
from dovetail.parts.position.learned import LearnedModule
from dovetail.parts.position.rope import RopeModule
from dovetail.parts.position.scaling import Dynamic, Yarn
from dovetail.port import hf
from dovetail.state import frame, slots
from dovetail.state.pool import Pool

_turn, _angles, _score = RopeModule.turn, RopeModule.angles, AlibiModule.score
_project, _edit, _setup = AttentionModule.project, AttentionModule.edit, AttentionModule.setup
_added, _ref, _frame = WireModule.added, attend_ref.run, frame.make_frame
_extend, _whole_at, _cost, _state = frame.TokenView.extend, context.whole_layout, Attention.cost, Attention.state


def pairs_adjacent(self: RopeModule, x: Tensor, layout: TokenLayout) -> Tensor:
    cos, sin = self.angles(layout, x.dtype)
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)


def turned_tail(self: RopeModule, x: Tensor, layout: TokenLayout) -> Tensor:
    return _turn(self, x.flip(-1), layout).flip(-1)


def by_place_in_the_call(self: RopeModule, layout: TokenLayout, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    order = torch.arange(layout.n).expand_as(layout.order)
    return _angles(self, TokenLayout.of(order, layout.seg, layout.row), dtype)


def padding_counted(self: LearnedModule, x: Tensor, layout: TokenLayout) -> Tensor:
    order = torch.arange(layout.n).expand_as(layout.order) if layout.n > 1 and layout.row is None else layout.order
    return x + F.embedding(order + self.part.offset, self.table)


def flat_at_decode(self: AlibiModule, q: TokenLayout, k: TokenLayout, *tables: Tensor) -> Tensor:
    return _score(self, q, k, *tables) * (q.n > 1)


def one_more(self: Window, q: TokenLayout, k: TokenLayout, heads: Tensor) -> Tensor:
    return (q.order[..., :, None] - k.order[..., None, :]).abs()[..., None, :, :] <= self.size


def one_ahead(self: Causal, q: TokenLayout, k: TokenLayout, heads: Tensor) -> Tensor:
    return (q.order[..., :, None] - k.order[..., None, :])[..., None, :, :] >= -1


def padding_seen(q: TokenLayout, k: TokenLayout) -> Tensor:
    same = (q.seg[..., :, None] == k.seg[..., None, :]) | (k.seg < 0)[..., None, :]
    return same if q.row is None or k.row is None else same & (q.row[..., :, None] == k.row[..., None, :])


def documents_mixed(q: TokenLayout, k: TokenLayout) -> Tensor:
    real = (q.seg >= 0)[..., :, None] & (k.seg >= 0)[..., None, :]
    return real if q.row is None or k.row is None else real & (q.row[..., :, None] == k.row[..., None, :])


def rows_mixed(q: TokenLayout, k: TokenLayout) -> Tensor:
    return (q.seg[..., :, None] == k.seg[..., None, :]) & (q.seg >= 0)[..., :, None]


def nan_where_nothing_is_seen(
    q: Tensor, k: Tensor, v: Tensor, scoring: Any, q_layout: TokenLayout, k_layout: TokenLayout, seen: Any
) -> Tensor:
    out = _ref(q, k, v, scoring, q_layout, k_layout, seen)
    return out.masked_fill(seen[1], torch.nan)


def heads_in_the_wrong_order(
    q: Tensor, k: Tensor, v: Tensor, scoring: Any, q_layout: TokenLayout, k_layout: TokenLayout, seen: Any
) -> Tensor:
    shared = q.shape[-3] // k.shape[-3]
    repeat = [1] * (k.dim() - 3) + [shared, 1, 1]
    return _ref(q, k.repeat(repeat), v.repeat(repeat), scoring, q_layout, k_layout, seen)


def cap_forgotten(
    q: Tensor, k: Tensor, v: Tensor, scoring: Any, q_layout: TokenLayout, k_layout: TokenLayout, seen: Any = None
) -> Tensor:
    return _tiled(q, k, v, dc.replace(scoring, softcap=None), q_layout, k_layout, seen)


_tiled = attend_tiled.run


def scale_forgotten(self: AttentionModule) -> None:
    _setup(self)
    self.scale = 1.0


def old_keys_only(self: frame.TokenView, layout: TokenLayout, *new: Tensor) -> Any:
    values, key_layout = _extend(self, layout, *(torch.zeros_like(x) if layout.n == 1 else x for x in new))
    return values, key_layout


def stale_answer(self: TokenLayout, queries: TokenLayout, key: Any, make: Callable[..., Any], *given: Any) -> Any:
    return _stale.setdefault((key, self.n, queries.n), make(*given))


_stale: dict[Any, Any] = {}


def ring_too_short(self: slots.Ring, held: int) -> list[int]:
    first = range(min(self.keep, held))
    return [*first, *range(max(len(first), held - self.turn + self.slack + 1), held)]


def ring_keeps_nothing(self: slots.Ring, row: Tensor, position: Tensor) -> Tensor:
    return row * self.stride + position % self.stride


def back_without_going(self: Pool, row: int, n: int) -> int:
    return n


def mark_forgotten(self: Pool, row: int, n: int) -> int:
    return n


def pages_shared_for_ever(self: slots.Paged, row: int, held: int, new: int) -> slots.Copies:
    owned = self.owned[row]
    while len(owned) * self.page < held + new:
        owned.append(self._take())
    self.table[row, : len(owned)] = torch.tensor(owned, dtype=torch.long)
    return slots.NO_COPIES


def fork_loses(self: slots.Contiguous, a: int, b: int, held: int) -> slots.Copies:
    return slots.NO_COPIES


def pattern_of_layers_ignored(self: State, n: int) -> int:
    return n


def grouped_heads_not_counted(self: Attention, scope: Any) -> list[State]:
    return [dc.replace(s, axes=("heads", "head")) for s in _state(self, scope)]


def half_the_products(self: Attention, scope: Any, n: int) -> tuple[int, int]:
    whole, touched = _cost(self, scope, n)
    return whole // 2, touched // 2


def false_is_default(self: Part) -> dict[str, Any]:
    return {name: value for name, value in _changed(self).items() if value is not False}


_changed = Part.changed


def residual_sum_tapped(self: WireModule, y: Tensor, block: Any, branch: str, ctx: Any) -> Tensor:
    out = _added(self, y, block, branch, dc.replace(ctx, listen=None))
    ctx.tap(block, f"{branch}_add", out + 1.0)
    return out


def pattern_never_shown(self: AttentionModule, ctx: Any) -> None:
    return None


def breaks_the_graph(self: RMSNormModule, x: Tensor, ctx: Any) -> Tensor:
    scale = self.scale * 1.0 if bool(x.sum() > 1e30) else self.scale
    return F.rms_norm(x, (x.shape[-1],), scale, self.part.eps)


def spread_held_fixed(self: RMSNormModule, x: Tensor, ctx: Any) -> Tensor:
    spread = torch.rsqrt((x * x).mean(-1, keepdim=True) + self.part.eps).detach()
    return x * spread * self.scale


def scale_not_learned(self: RMSNormModule, x: Tensor, ctx: Any) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), self.scale.detach(), self.part.eps)


def gate_and_up_swapped(self: GluModule, x: Tensor, ctx: Any, view: Any = None) -> Tensor:
    return ctx.tap(self, "out", self.down(ctx.tap(self, "hidden", self.act(self.up(x)) * self.gate(x))))


def beta_ignored(self: Yarn, plain: Tensor, base: float) -> Tensor:
    return _yarn(dc.replace(self, beta_fast=32.0), plain, base)


_yarn = Yarn.frequencies


def factor_ignored(self: Dynamic, plain: Tensor, base: float, length: Tensor) -> Tensor:
    return _dynamic(dc.replace(self, factor=1.0), plain, base, length)


_dynamic = Dynamic.at_length


def tables_never_saved(self: Weight) -> bool:
    return self.role != "const" and self.same_as is None and self.name != "table"


def norms_swapped(spec: Model, tensors: Any, name: str | None = None) -> dict[str, Tensor]:
    crossed = {
        path.replace("mixer_norm", "?").replace("ffn_norm", "mixer_norm").replace("?", "ffn_norm"): t
        for path, t in tensors.items()
    }
    return _export(spec, crossed, name)


_export = hf.export_tensors


def skipped_when_full(self: Causal, q: Any, k: Any, head: int) -> Fill:
    return Fill.EMPTY if k.high <= q.low else Fill.PART


def counted_on_every_rank(d: Any, tp_region: Any, cut: Any, ranks: Any) -> Any:
    bent = d._replace(weight=dc.replace(d.weight, tp="auto")) if d.weight.tp == "once" else d
    return _reader(bent, tp_region, cut, ranks)


_reader = shard._reader


def gradient_of_one_rank(x: Tensor, group: Any) -> Tensor:
    return x


def pieces_in_reverse(x: Tensor, dim: int, group: Any) -> Tensor:
    return torch.cat(list(_gather(x, dim, group).chunk(2, dim))[::-1], dim)


_gather = collective.gather
