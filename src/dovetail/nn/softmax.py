"""Softmax mixers: the base of every mixer with a softmax over keys.

    z = softmax(cap(q kᵀ · scale) + bias, where the mask allows) v

A part derives from `SoftmaxMixer` (heads, mask, KV cache, checks), its module from `SoftmaxModule` (its scoring).
"""

from __future__ import annotations

import dataclasses as dc
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dovetail.nn.ctx import Ctx
from dovetail.nn.groups import CrossMixer, Mask, Mixer, Order, Position, PositionModule
from dovetail.nn.layout import TokenLayout
from dovetail.nn.linear import Linear
from dovetail.nn.module import Module
from dovetail.nn.view import KV, Edit, KVView, OnRead, Scoring
from dovetail.spec.part import KINDS, Problem
from dovetail.spec.part_proof import FieldCause, Proof
from dovetail.spec.scope import Scope
from dovetail.spec.weight import State, Weight

SCORE_SCALE = FieldCause("score scale", (1.0,))  # of the field that multiplies the scores


class SoftmaxMixer(Mixer):
    """A mixer with `heads` softmax heads and one mask."""

    tp_region = True

    heads: int
    mask: Mask

    def visibility(self) -> Mask:
        """The mask over the keys: the field `mask`, unless the part fixes it."""
        return self.mask

    def head_number(self) -> Weight:
        """The constant (heads,) 0, 1, …: sharded across ranks, it gives the numbers of a rank's heads."""
        return Weight(name="head_number", out=("heads",), role="const", dtype="int64")

    def constant(self, name: str, scope: Scope) -> Tensor:
        return torch.arange(self.heads)

    def order(self) -> Order:
        return self.visibility().order()

    def ahead(self) -> int | None:
        if self.order() == "both":  # nothing is cached, so that no token can follow, not even behind a prefix
            return None
        return 0 if self.order() == "causal" else self.visibility().ahead()

    def cached(self, scope: Scope, *states: State) -> list[State]:
        """States with one entry per token, as far back as the mask reaches; none where the mixer does not decode."""
        if self.order() == "both" or not scope.decodes:
            return []
        window, keep, ahead = self.mask.reach(), self.mask.kept(), self.ahead() or 0
        return [dc.replace(state, window=window, keep=keep, ahead=ahead) for state in states]

    def position_scope(self, scope: Scope) -> Scope:
        """The scope of the position: whether the mixer decodes, and the size of a windowed KV cache."""
        states = self.state(scope)
        scope = dc.replace(scope, decodes=bool(states))
        for state in states:
            if state.window is not None:
                scope = scope.add(cache=state.keep + state.window, kept=state.keep)
        return scope

    def whole_prefill(self, scope: Scope) -> str | None:
        late = self.order() == "ahead" and self.ahead() is None
        return f"{self.visibility().kind}: an early query sees later keys" if late else None

    def check_mask(self, scope: Scope) -> list[Problem]:
        """The problems of the field `mask`, with their path."""
        return [Problem(f"mask.{p.field}", p.problem, p.remedy) for p in self.mask.check(scope)]


class SoftmaxMixerProof(Proof, of=SoftmaxMixer):
    """Causes."""

    causes = {"scale": SCORE_SCALE}


class SoftmaxCross(CrossMixer, SoftmaxMixer):
    """A softmax mixer over the encoder output: every query sees all of its source, which has one entry per token of it."""

    def visibility(self) -> Mask:
        mask: Any = KINDS["full"]
        return mask()

    def cached(self, scope: Scope, *states: State) -> list[State]:
        return [dc.replace(state, per="source") for state in states]

    def check_mask(self, scope: Scope) -> list[Problem]:
        return no_encoder(scope)


def no_encoder(scope: Scope) -> list[Problem]:
    """The problem of a part that reads an encoder output where there is none."""
    return [] if "encoder" in scope.sizes else [Problem("", "there is no encoder", "give the model an `encoder:`")]


def head_size(heads: int, head: int | None, scope: Scope) -> int:
    """The size of one head: `head`, or width / heads."""
    return head or scope.size("embed") // max(heads, 1)


def check_heads(heads: int, kv_heads: int, head: int | None, scope: Scope) -> list[Problem]:
    """The problems of the fields `heads`, `kv_heads` and `head`."""
    if heads % kv_heads:
        return [Problem("kv_heads", f"{kv_heads} does not divide {heads} heads", "make heads a multiple of kv_heads")]
    if head is None and scope.size("embed") % heads:
        what = f"{heads} does not divide the width, {scope.size('embed')}"
        return [Problem("heads", what, "change heads, or set `head`, the size of one head")]
    return []


def check_position(position: Position) -> list[Problem]:
    """The problem of a position that belongs to the model, not to a mixer."""
    if position.site != "stream":
        return []
    what = f"{position.kind} acts on the residual stream, not in a mixer"
    return [Problem("position", what, "put it in the model's `position`, or use swap")]


class SoftmaxModule(Module):
    """The scoring of a softmax mixer. A subclass sets `scale` in its setup, and `softcap` and `dropout` where it has them."""

    part: Any
    o: Linear
    head_number: Tensor
    position: PositionModule
    scale: float
    softcap: float | None = None
    dropout: float = 0.0

    def setup(self) -> None:
        self.mask: Mask = self.part.visibility()
        self.mask.key  # noqa: B018  cached here, outside any compiled graph
        self.needs = self.part.needs()
        self.biased, self.tapped = "bias" in self.needs, "pattern" in self.part.TAPS
        self.slope = self.part.position.slope if self.biased else None
        self.fixed: Scoring | None = None

    def scoring(self, ctx: Ctx) -> Scoring:
        """The scoring, with the tensors that the module has now; of the ctx only its ranks matter. One that has no other tensor
        than the numbers of the heads is made once; a compiled graph makes its own."""
        heads, compiling = self.head_number, torch.compiler.is_compiling()
        if self.fixed is not None and self.fixed.heads is heads and not compiling:
            return self.fixed
        scoring = Scoring(
            mask=self.mask,
            scale=self.scale,
            heads=heads,
            softcap=self.softcap,
            bias=self.position.score if self.biased else None,
            tables=self.position.tables() if self.biased else (),
            slopes=None if self.slope is None else getattr(self.position, self.slope),
            sink=self.sink_logit(),
            prefix=self.learned_entries(),
            on_read=self.on_read(ctx),
            needs=self.needs,
        )
        own = (scoring.bias, scoring.sink, scoring.prefix, scoring.on_read)
        self.fixed = scoring if own == (None,) * len(own) and not compiling else None
        return scoring

    def sink_logit(self) -> Tensor | None:
        """The learned logit of a sink (heads,), where there is one."""
        return None

    def learned_entries(self) -> tuple[Tensor, Tensor] | None:
        """The learned keys and values (p, kv_heads, head) that every query sees, where there are some."""
        return None

    def on_read(self, ctx: Ctx) -> OnRead | None:
        """What keys undergo when they are read, where a kernel reads them."""
        return None

    def edit(self, ctx: Ctx) -> Edit | None:
        """The function that edits the probs after the softmax: a listener's, dropout in training, or None."""
        heard, drops = self.tapped and ctx.wants(self, "pattern"), ctx.draws is not None and self.dropout > 0
        if not heard and not drops:
            return None

        def run(probs: Tensor, *layouts: TokenLayout) -> Tensor:
            if ctx.taps is not None:
                probs = ctx.taps.hear(address, probs, layouts[0])
            return probs if ctx.draws is None else ctx.draws.dropout_probs(ctx, probs, self.dropout, self, "pattern", *layouts)

        address = f"{self.path}.pattern"
        if ctx.taps is not None and heard and not drops and not ctx.taps.edits(address):
            return Edit(run, reads=partial(ctx.taps.queries, address))
        return Edit(run, scales=not heard)

    def project_out(self, z: Tensor, ctx: Ctx) -> Tensor:
        """z (…, n, heads, head) back to the residual stream (…, n, embed)."""
        return ctx.tap(self, "out", self.o(ctx.tap(self, "z", z).flatten(-2), ctx))


class ValuedModule(SoftmaxModule):
    """A module that says what it stores of tokens, and attends to all that is stored."""

    def entries(self, tokens: Tensor, ctx: Ctx) -> tuple[Tensor, ...]:
        """What is stored of tokens (…, m, channels): by default the tokens themselves."""
        return (tokens,)

    def kv(self, x: Tensor, ctx: Ctx, view: KVView) -> KV:
        """The entries of all tokens, those of x appended."""
        return view.append(ctx.layout, *self.entries(x, ctx))


class CrossModule(ValuedModule):
    """The module of a mixer that reads the encoder output (…, m, encoder), whose `entries` are stored once per source."""

    def kv(self, x: Tensor, ctx: Ctx, view: KVView) -> KV:
        """The entries of the encoder output: those stored at admission, or in a whole pass those of the ctx."""
        return view.stored() if ctx.encoder_output is None else self.fill(ctx, view)

    def fill(self, ctx: Ctx, view: KVView) -> KV:
        """Append the entries of the encoder output: in a whole pass, and once at admission."""
        assert ctx.encoder_output is not None
        assert ctx.encoder_layout is not None
        return view.append(ctx.encoder_layout, *self.entries(ctx.encoder_output, ctx))
