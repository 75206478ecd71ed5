"""Named bugs, most of them shipped by someone once, planted one at a time: the law named with each must fail.

A law never seen to fail proves nothing. Each row says what goes wrong, the law that must see it, the spec it is planted in, and
the change itself; before the bug is planted the law must hold there.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.core.at import At
from dovetail.core.group import Fill
from dovetail.core.part import Part, walk_spec
from dovetail.core.weight import State, Weight
from dovetail.dist import collective, context, shard
from dovetail.laws import ported, sharded
from dovetail.laws.case import LAWS, Broken, Case, NotApplicable
from dovetail.laws.oracle import check_oracles
from dovetail.laws.suite import OWN_NUMBER
from dovetail.model import Model, WireModule
from dovetail.ops import attend, attend_ref, attend_tiled, mask
from dovetail.parts.ffn.glu import GluModule
from dovetail.parts.mask.near import Causal, Window
from dovetail.parts.mixer.attention import Attention, AttentionModule
from dovetail.parts.norm import RmsModule
from dovetail.parts.position.alibi import AlibiModule
from dovetail.parts.position.learned import LearnedModule
from dovetail.parts.position.rope import RopeModule
from dovetail.parts.position.scaling import Dynamic, Yarn
from dovetail.port import hf
from dovetail.spec import from_yaml, to_yaml
from dovetail.state import frame, slots
from dovetail.state.pool import Pool

BASE = """
width: 28
vocab: 62
layers: [{repeat: 2, mixer: {heads: 6, kv_heads: 2, head: 12}, ffn: {hidden: 44}}]
head: {kind: lm, tied: false}
"""


def spec(width: int = 28, **mixer: Any) -> Model:
    """A small Llama with a mixer of its own."""
    made = from_yaml(BASE).set("width", width)
    for name, value in mixer.items():
        made = made.set(f"layers.*.mixer.{name}", value)
    return made


@dc.dataclass(frozen=True)
class Mutant:
    """A bug: what it is, which law must see it, where it is planted, how; the public report it replants, if any."""

    name: str
    law: str
    plant: Callable[[], AbstractContextManager[Any]]
    spec: Model = dc.field(default_factory=spec)
    report: str = ""


def kernel(name: str, run: Callable[..., Tensor]) -> Callable[[], AbstractContextManager[Any]]:
    """Another function in place of a backend's."""
    bent = [backend._replace(run=run) if backend.name == name else backend for backend in attend.BACKENDS]
    return lambda: patch.object(attend, "BACKENDS", bent)


def instead(owner: Any, name: str, new: Any) -> Callable[[], AbstractContextManager[Any]]:
    """Another function in place of the one called `name`."""
    return lambda: patch.object(owner, name, new)


# -- the changes: each keeps the old function at hand where it only bends it -----------------------------------------------

_turn, _angles, _score = RopeModule.turn, RopeModule.angles, AlibiModule.score
_project, _edit, _setup = AttentionModule.project, AttentionModule.edit, AttentionModule.setup
_added, _ref, _frame = WireModule.added, attend_ref.run, frame.make_frame
_extend, _whole_at, _cost, _state = frame.TokenView.extend, context.whole_at, Attention.cost, Attention.state


def pairs_adjacent(self: RopeModule, x: Tensor, at: At) -> Tensor:
    cos, sin = self.angles(at, x.dtype)
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)


def turned_tail(self: RopeModule, x: Tensor, at: At) -> Tensor:
    return _turn(self, x.flip(-1), at).flip(-1)


def by_place_in_the_call(self: RopeModule, at: At, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    order = torch.arange(at.n).expand_as(at.order)
    return _angles(self, At.of(order, at.seg, at.row), dtype)


def padding_counted(self: LearnedModule, x: Tensor, at: At) -> Tensor:
    order = torch.arange(at.n).expand_as(at.order) if at.n > 1 and at.row is None else at.order
    return x + F.embedding(order + self.part.offset, self.table)


def flat_at_decode(self: AlibiModule, q: At, k: At, *tables: Tensor) -> Tensor:
    return _score(self, q, k, *tables) * (q.n > 1)


def one_more(self: Window, q: At, k: At, heads: Tensor) -> Tensor:
    return (q.order[..., :, None] - k.order[..., None, :]).abs()[..., None, :, :] <= self.size


def one_ahead(self: Causal, q: At, k: At, heads: Tensor) -> Tensor:
    return (q.order[..., :, None] - k.order[..., None, :])[..., None, :, :] >= -1


def padding_seen(q: At, k: At) -> Tensor:
    same = (q.seg[..., :, None] == k.seg[..., None, :]) | (k.seg < 0)[..., None, :]
    return same if q.row is None or k.row is None else same & (q.row[..., :, None] == k.row[..., None, :])


def documents_mixed(q: At, k: At) -> Tensor:
    real = (q.seg >= 0)[..., :, None] & (k.seg >= 0)[..., None, :]
    return real if q.row is None or k.row is None else real & (q.row[..., :, None] == k.row[..., None, :])


def rows_mixed(q: At, k: At) -> Tensor:
    return (q.seg[..., :, None] == k.seg[..., None, :]) & (q.seg >= 0)[..., :, None]


def nan_where_nothing_is_seen(q: Tensor, k: Tensor, v: Tensor, rule: Any, qa: At, ka: At, seen: Any) -> Tensor:
    out = _ref(q, k, v, rule, qa, ka, seen)
    return out.masked_fill(seen[1], torch.nan)


def heads_in_the_wrong_order(q: Tensor, k: Tensor, v: Tensor, rule: Any, qa: At, ka: At, seen: Any) -> Tensor:
    shared = q.shape[-3] // k.shape[-3]
    repeat = [1] * (k.dim() - 3) + [shared, 1, 1]
    return _ref(q, k.repeat(repeat), v.repeat(repeat), rule, qa, ka, seen)


def cap_forgotten(q: Tensor, k: Tensor, v: Tensor, rule: Any, qa: At, ka: At, seen: Any = None) -> Tensor:
    return _tiled(q, k, v, dc.replace(rule, softcap=None), qa, ka, seen)


_tiled = attend_tiled.run


def scale_forgotten(self: AttentionModule) -> None:
    _setup(self)
    self.scale = 1.0


def old_keys_only(self: frame.TokenView, at: At, *new: Tensor) -> Any:
    values, key_at = _extend(self, at, *(torch.zeros_like(x) if at.n == 1 else x for x in new))
    return values, key_at


def stale_answer(self: At, queries: At, key: Any, make: Callable[[], Any]) -> Any:
    return _stale.setdefault((key, self.n, queries.n), make())


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
        owned.append(self._take(row))
    self.table[row, : len(owned)] = torch.tensor(owned, dtype=torch.long)
    return slots.NO_COPIES


def fork_loses(self: slots.Contiguous, a: int, b: int, held: int) -> slots.Copies:
    return slots.NO_COPIES


def pattern_of_layers_ignored(self: State, n: int) -> int:
    return n


def grouped_heads_not_counted(self: Attention, env: Any) -> list[State]:
    return [dc.replace(s, axes=("heads", "head")) for s in _state(self, env)]


def half_the_products(self: Attention, env: Any, n: int) -> tuple[int, int]:
    whole, touched = _cost(self, env, n)
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


def breaks_the_graph(self: RmsModule, x: Tensor, ctx: Any) -> Tensor:
    scale = self.scale * 1.0 if bool(x.sum() > 1e30) else self.scale
    return F.rms_norm(x, (x.shape[-1],), scale, self.part.eps)


def spread_held_fixed(self: RmsModule, x: Tensor, ctx: Any) -> Tensor:
    spread = torch.rsqrt((x * x).mean(-1, keepdim=True) + self.part.eps).detach()
    return x * spread * self.scale


def scale_not_learned(self: RmsModule, x: Tensor, ctx: Any) -> Tensor:
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
        path.replace("mixer_norm", "?").replace("ffn_norm", "mixer_norm").replace("?", "ffn_norm"): t for path, t in tensors.items()
    }
    return _export(spec, crossed, name)


_export = hf.export_tensors


def skipped_when_full(self: Causal, q: Any, k: Any, head: int) -> Fill:
    return Fill.EMPTY if k.high <= q.low else Fill.PART


def counted_on_every_rank(d: Any, region: Any, cut: Any, ranks: Any) -> Any:
    bent = d._replace(weight=dc.replace(d.weight, tp="auto")) if d.weight.tp == "once" else d
    return _reader(bent, region, cut, ranks)


_reader = shard._reader


def gradient_of_one_rank(x: Tensor, group: Any) -> Tensor:
    return x


def pieces_in_reverse(x: Tensor, dim: int, group: Any) -> Tensor:
    return torch.cat(list(_gather(x, dim, group).chunk(2, dim))[::-1], dim)


_gather = collective.gather


# -- the table -------------------------------------------------------------------------------------------------------------

WINDOW = [{"kind": "causal"}, {"kind": "window", "size": 5, "keep": 1}]
FIVE = [{"kind": "causal"}, {"kind": "window", "size": 5}]


def _mutants() -> list[Mutant]:
    window, alibi, capped = spec(mask=WINDOW), spec(position="alibi"), spec(softcap=2.0)
    yarn = {"kind": "rope", "scaling": {"kind": "yarn", "original": 200, "beta_fast": 8.0, "beta_slow": 1.0, "truncate": False}}
    dynamic = {"kind": "rope", "scaling": {"kind": "dynamic", "original": 8}}
    biased = spec(bias=True, out_bias=True)
    learned = spec(position="none").set("position", {"kind": "learned", "length": 64})
    llama = spec(width=30)  # the reference wants heads to divide the width
    return [
        Mutant("the count of state ignores windows", "declared", instead(State, "entries", pattern_of_layers_ignored), spec(mask=FIVE), "hf-mem#61"),
        Mutant("the cache is as large as with full heads", "declared", instead(Attention, "state", grouped_heads_not_counted), report="hf-mem#61"),
        Mutant("half of the attention products are not counted", "declared", instead(Attention, "cost", half_the_products)),
        Mutant("a field that is false is not written", "round_trip", instead(Part, "changed", false_is_default)),
        Mutant("a trained head is not saved, as if it were tied", "round_trip", instead(Weight, "learned", property(tables_never_saved)), report="transformers#45127"),
        Mutant("a token sees the next one", "causal", instead(Causal, "visible", one_ahead), spec(position="alibi")),
        Mutant("rotary positions count from the start of the call", "chunked", instead(RopeModule, "angles", by_place_in_the_call), report="x-transformers#219"),
        Mutant("ALiBi is zero at every decode step", "chunked", instead(AlibiModule, "score", flat_at_decode), alibi, "keras-hub#2977"),
        Mutant("a decoded key is never written", "chunked", instead(frame.TokenView, "extend", old_keys_only), report="TransformerLens#776"),
        Mutant("a window is wrong once its ring has filled", "chunked", instead(slots.Ring, "positions", ring_too_short), window, "transformers#37574"),
        Mutant("a ring overwrites the tokens it should keep", "chunked", instead(slots.Ring, "slot", ring_keeps_nothing), window, "vllm#3385"),
        Mutant("a mask of an earlier step is used again", "chunked", instead(At, "once_for", stale_answer), spec(mask=FIVE), "x-transformers#311"),
        Mutant("left padding moves positions", "padded", instead(LearnedModule, "embed", padding_counted), learned, "transformers#22707"),
        Mutant("padding is looked at", "padded", instead(mask, "same_document", padding_seen), report="transformers#47651"),
        Mutant("a row that sees nothing gives NaN", "padded", kernel("reference", nan_where_nothing_is_seen), capped, "unsloth#9848"),
        Mutant("packed documents see each other", "padded", instead(mask, "same_document", documents_mixed), report="axolotl#1375"),
        Mutant("a request sees its neighbours in a flat batch", "padded", instead(mask, "same_document", rows_mixed), report="vllm#1069"),
        Mutant("the tiled kernel forgets the soft-cap", "fast", kernel("tiled", cap_forgotten), capped, "TransformerLens#693"),
        Mutant("query heads are matched with the wrong key heads", "fast", kernel("reference", heads_in_the_wrong_order)),
        Mutant("full tiles are taken for empty ones", "fast", instead(Causal, "tile", skipped_when_full)),
        Mutant("rolling back does nothing", "rollback", instead(Pool, "rollback", back_without_going)),
        Mutant("a wrapped ring is not brought back to its mark", "rollback", instead(Pool, "_to_mark", mark_forgotten), window),
        Mutant("a page shared by a fork is written to", "rollback", instead(slots.Paged, "reserve", pages_shared_for_ever)),
        Mutant("a fork starts with nothing", "rollback", instead(slots.Contiguous, "fork", fork_loses)),
        Mutant("a bias is added once on every rank", "sharded", instead(shard, "_reader", counted_on_every_rank), biased),
        Mutant("a gradient stays on the rank it came to", "sharded", instead(shard, "enter", gradient_of_one_rank)),
        Mutant("pieces of a sequence are joined in reverse", "sharded", instead(context, "gather", pieces_in_reverse)),
        Mutant("a tap called mixer_add holds something else", "tapped", instead(WireModule, "added", residual_sum_tapped), report="TransformerLens#1639"),
        Mutant("a fused kernel hides the pattern", "tapped", instead(AttentionModule, "edit", pattern_never_shown), report="pytorch#119811"),
        Mutant("a block looks at a value while it is compiled", "compiled", instead(RmsModule, "forward", breaks_the_graph)),
        Mutant("a norm's spread is a constant in backward", "gradient", instead(RmsModule, "forward", spread_held_fixed)),
        Mutant("rotary pairs are interleaved everywhere", "ported", instead(RopeModule, "turn", pairs_adjacent), llama, report="llama.cpp#3018"),
        Mutant("scores are not scaled", "ported", instead(AttentionModule, "setup", scale_forgotten), llama, report="TransformerLens#693"),
        Mutant("keys and shapes agree, two norms are exchanged", "ported", instead(ported, "export_tensors", norms_swapped), llama, report="open-instruct#1839"),
        Mutant("gate and up are exchanged", "ported", instead(GluModule, "forward", gate_and_up_swapped), llama),
        Mutant("the wrong part of the head turns", OWN_NUMBER, instead(RopeModule, "turn", turned_tail), report="TransformerLens#385"),
        Mutant("a window of w sees w + 1", OWN_NUMBER, instead(Window, "visible", one_more), window, "vllm#3385"),
        Mutant("a field of YaRN is silently ignored", "every_field", instead(Yarn, "frequencies", beta_ignored), spec(position=yarn), "Megatron-LM#6305"),
        Mutant("dynamic NTK forgets its factor", "every_field", instead(Dynamic, "at_length", factor_ignored), spec(position=dynamic), "transformers#27227"),
        Mutant("a norm's weight is never trained", "every_weight", instead(RmsModule, "forward", scale_not_learned)),
    ]


def named() -> dict[str, Mutant]:
    """Every named bug."""
    return {mutant.name: mutant for mutant in _mutants()}


# -- running ---------------------------------------------------------------------------------------------------------------


def verdict(law: str, model: Model, planted: str | None = None) -> str:
    """What the law says of a model, with a bug planted or without: empty where it holds."""
    if law == OWN_NUMBER:
        kinds = {part.kind for _, part in _every_part(model)} | {"rope", "window"}
        return "; ".join(str(f) for f in check_oracles(sorted(kinds))[:1])
    if law == "sharded":
        return _sharded(model, planted)
    try:
        LAWS[law].check(Case(model))
    except NotApplicable as reason:
        return f"not applicable: {reason}" if planted is None else ""
    except Broken as broken:
        return str(broken)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return ""


def _every_part(model: Model) -> Any:
    return (entry for entry in walk_spec(model) if entry[1].group not in ("model", "block"))


def _sharded(model: Model, planted: str | None) -> str:
    """The bug must be planted in the ranks themselves."""
    for how in sharded.SPLITS:
        found = sharded.the_pair().run(compare_planted, planted, to_yaml(model), how)
        worst = max((one.worst for one in found), key=lambda item: item[1])
        if not worst[1] <= 1e-9:
            return f"{how}: {worst[0]} differs by {worst[1]:.3g}"
    return ""


def compare_planted(planted: str | None, text: str, how: sharded.How) -> sharded.Compared:
    """The job of one rank: whole against sharded, with a bug."""
    if planted is None:
        return sharded.compare(text, 0, how)
    with named()[planted].plant():
        return sharded.compare(text, 0, how)


def run_named(told: Callable[[int, int, str], None] | None = None, only: Callable[[Mutant], bool] | None = None) -> dict[str, Any]:
    """Plant every bug; {mutants, caught, rows}."""
    chosen = [mutant for mutant in named().values() if only is None or only(mutant)]
    rows: list[dict[str, Any]] = []
    sound: dict[tuple[str, str], str] = {}
    for i, mutant in enumerate(chosen):
        if told is not None:
            told(i, len(chosen), mutant.name)
        key = (mutant.law, mutant.spec.key)
        if key not in sound:
            sound[key] = verdict(mutant.law, mutant.spec)
        with mutant.plant():
            said = verdict(mutant.law, mutant.spec, mutant.name)
        caught = bool(said) and not sound[key]
        why = f"{mutant.law}: {said}" if caught else f"{mutant.law} {'fails without it: ' + sound[key] if sound[key] else 'holds'}"
        rows.append({"name": mutant.name, "law": mutant.law, "report": mutant.report, "caught": caught, "by": why})
    return {"mutants": len(rows), "caught": sum(row["caught"] for row in rows), "rows": rows}
