"""Seeded bugs of looking: those that other tools shipped, and those that are near (law 28)."""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dovetail.files.spec import from_yaml
from dovetail.look.address import Target
from dovetail.look.intervention import noise
from dovetail.look.resumed import Resumed
from dovetail.look.site import Site
from dovetail.look.tracer import Tracer
from dovetail.model.model import ModelModule
from dovetail.nn.block import Branching, WireModule
from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout
from dovetail.nn.recur import Carry, RecurrentModule
from dovetail.nn.view import KV
from dovetail.ops.attend import StoredEntries
from dovetail.parts.mixer.attention import AttentionModule
from dovetail.parts.norm import RMSNormModule
from dovetail.proof.laws import looking
from dovetail.proof.laws.mutant import Mutant, instead, spec

_hear, _positions, _added = Tracer.hear, Site.positions, WireModule.added
MAMBA2 = """
width: 28
vocab: 62
layers: [{repeat: 2, mixer: {kind: mamba2, inner: 60, head: 6, state_size: 5}, ffn: {hidden: 44}}]
"""


def scale_of_a_norm_read_only(self: RMSNormModule, x: Tensor, ctx: Ctx) -> Tensor:
    ctx.tap(self, "scale", torch.sqrt((x * x).mean(-1, keepdim=True) + self.part.eps))
    return ctx.tap(self, "out", self.forward(x, dc.replace(ctx, taps=None)))


def output_of_a_norm_read_only(self: RMSNormModule, x: Tensor, ctx: Ctx) -> Tensor:
    scale = ctx.tap(self, "scale", torch.sqrt((x * x).mean(-1, keepdim=True) + self.part.eps))
    out = x / scale * self.scale
    ctx.tap(self, "out", out)
    return out


def added_before_its_multiplier(self: WireModule, y: Tensor, block: Branching, branch: str, ctx: Ctx) -> Tensor:
    return _added(self, ctx.tap(block, f"{branch}_add", y), block, branch, dc.replace(ctx, taps=None))


def heard_in_prefill_only(self: Tracer, address: str, x: Tensor, layout: TokenLayout | None = None) -> Tensor:
    return _hear(self, address, x, layout) if layout is None or layout.n > 1 else x


def index_taken_for_the_position(self: Site, x: Tensor, axis: str) -> Tensor:
    positions = _positions(self, x, axis)
    return torch.arange(positions.shape[-1]).expand_as(positions)


def rows_ignored(self: Site, x: Tensor) -> Site:
    picks = {axis: pick for axis, pick in self.target.picks.items() if axis != "row"}
    return dc.replace(self, target=self.target._replace(picks=picks))


def copy_recorded_for_gradients(self: Tracer, address: str, x: Tensor, layout: TokenLayout | None = None) -> Tensor:
    x = _hear(self, address, x, layout)
    for target in self.records.get(address, ()) if self.grad else ():
        self.pieces[target.key][1][-1] = x.clone()
    return x


def pattern_recomputed_for_a_patch(self: Tracer, address: str) -> bool:
    return False


def state_of_the_next_call_unpatched(self: RecurrentModule, carry: Carry, ctx: Ctx) -> Carry:
    _listened(self, carry, ctx)
    return carry


_listened = RecurrentModule.listened


def entries_read_only(self: AttentionModule, kv: KV, ctx: Ctx) -> KV:
    (k, v), _ = kv.entries()
    ctx.tap(self, "keys", k)
    ctx.tap(self, "values", v)
    return kv


def entries_patched_in_the_cache(self: AttentionModule, kv: KV, ctx: Ctx) -> KV:
    (k, v), layout = kv.entries()
    with torch.no_grad():
        k.copy_(ctx.tap(self, "keys", k))
        v.copy_(ctx.tap(self, "values", v))
    return StoredEntries(layout, (k, v))


def noise_drawn_anew(self: noise, x: Tensor, site: Site) -> Tensor:
    return x * (1 + self.std * torch.randn_like(x))


def lens_without_the_norm(model: ModelModule, residual: Tensor, ctx: Ctx) -> Tensor:
    return model.head(residual, ctx)


def gradient_times_difference(*args: Any, steps: int = 16, **more: Any) -> Tensor:
    return 2 * _integrated(*args, steps=1, **more) - _integrated(*args, steps=steps, **more) * 0.99


_integrated = looking.integrated_gradients


def columns_one_token_late(*args: Any) -> Tensor:
    return _effective(*args).roll(1, -1)


_effective = looking.effective


_states, _start = Resumed._states, Resumed._start


def state_after_the_patched_token(self: Resumed, start: int) -> list[list[Tensor]]:
    return _states(self, start + 1)


def keys_of_another_run(self: Resumed, start: int) -> list[list[Tensor]]:
    own, self.inputs = self.inputs, self.inputs.flip(1)
    try:
        return _states(self, start)
    finally:
        self.inputs = own


def starts_after_the_patched_token(self: Resumed, target: Target) -> int:
    return min(_start(self, target) + 1, self.n)


def mutants() -> list[Mutant]:
    """The seeded bugs of this area."""
    halved = spec().set("layers.*.wire.multiplier", 0.5)
    lens, ours = "TransformerLens #1526", ""
    table: list[tuple[str, Callable[..., Any], Any, str]] = [
        ("a patched scale of a norm is ignored", instead(RMSNormModule, "listened", scale_of_a_norm_read_only), None, lens),
        ("a patched output of a norm is ignored", instead(RMSNormModule, "listened", output_of_a_norm_read_only), None, lens),
        (
            "the tap of a branch is not what it adds",
            instead(WireModule, "added", added_before_its_multiplier),
            halved,
            "TransformerLens #1648",
        ),
        ("a listener is called in prefill only", instead(Tracer, "hear", heard_in_prefill_only), None, ours),
        ("a position is taken for an index of the step", instead(Site, "positions", index_taken_for_the_position), None, ours),
        ("a patch of one row reaches its neighbors", instead(Site, "within", rows_ignored), None, ours),
        ("a gradient is that of a copy", instead(Tracer, "hear", copy_recorded_for_gradients), None, ours),
        (
            "a patched pattern is computed beside the output",
            instead(Tracer, "edits", pattern_recomputed_for_a_patch),
            None,
            ours,
        ),
        (
            "a patched recurrent state is not stored",
            instead(RecurrentModule, "listened", state_of_the_next_call_unpatched),
            from_yaml(MAMBA2),
            ours,
        ),
        ("patched KV entries are ignored", instead(AttentionModule, "listened", entries_read_only), None, ours),
        (
            "patched KV entries stay in the cache",
            instead(AttentionModule, "listened", entries_patched_in_the_cache),
            None,
            ours,
        ),
        ("noise is drawn anew in every call", instead(noise, "at", noise_drawn_anew), None, ours),
        ("the lens leaves out the final norm", instead(looking, "unembed", lens_without_the_norm), None, ours),
        (
            "attributions are not those of the path",
            instead(looking, "integrated_gradients", gradient_times_difference),
            None,
            ours,
        ),
        (
            "a sweep continues from the state after the patched token",
            instead(Resumed, "_states", state_after_the_patched_token),
            from_yaml(MAMBA2),
            ours,
        ),
        ("a sweep reads the keys of another run", instead(Resumed, "_states", keys_of_another_run), None, ours),
        (
            "a sweep starts after the token that it patches",
            instead(Resumed, "_start", starts_after_the_patched_token),
            None,
            ours,
        ),
        (
            "effective attention is one token late",
            instead(looking, "effective", columns_one_token_late),
            from_yaml(MAMBA2),
            ours,
        ),
    ]
    return [Mutant(name, "looking", seed, spec() if model is None else model, report) for name, seed, model, report in table]
