"""Attention: multi-head (MHA), multi-query (MQA) and grouped-query (GQA) softmax attention, and cross attention.

    q, k, v = x W_q, x W_k, x W_v          z = softmax(q kᵀ·scale, where the mask allows) v          out = z W_o

`heads` query heads share `kv_heads` KV heads: as many is MHA, 1 is MQA, any divisor between is GQA. Optional: QK-norm, a norm
of values, a soft-cap on the scores, a learned sink logit, an output gate σ(x W_g) ∘ z, biases, and `prefix` learned keys and
values that every query sees (ops/attend_sets.py). With `k_is_v` values are the projected keys, v = x W_k, before the norm and
the rotation of keys (Gemma 4). Cross attention takes k and v from the encoder output instead of x.

Shapes: x (…, n, embed)   q, z (…, n, heads, head)   k, v (…, m, kv_heads, head)   probs (…, heads, n, m).
Vaswani et al. 2017; Shazeer 2019 (MQA); Ainslie et al. 2023 (GQA); Dehghani et al. 2023 (QK-norm); Qiu et al. 2025 (gate).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dovetail.nn.cross_layer import DISCARDED, Values
from dovetail.nn.ctx import Ctx
from dovetail.nn.groups import CrossMixer, Earlier, EarlierModule, Mask, Norm, Position
from dovetail.nn.linear import Linear, multiply_fused
from dovetail.nn.module import Module
from dovetail.nn.softmax import (
    CrossModule,
    SoftmaxMixer,
    SoftmaxMixerProof,
    SoftmaxModule,
    check_heads,
    check_position,
    head_size,
    no_encoder,
)
from dovetail.nn.view import KV, KVView, OnRead
from dovetail.ops.attend import WHOLE, StoredEntries
from dovetail.ops.mask import pairs
from dovetail.spec.field import bounded
from dovetail.spec.part import Part, Problem, broken, child, register
from dovetail.spec.part_proof import FieldCause
from dovetail.spec.scope import Scope
from dovetail.spec.weight import Read, State, Weight

# fields that decide how queries and keys make scores
SCORING = frozenset({"mask", "position", "scale", "softcap", "sink", "prefix", "qk_norm", "qk_norm_whole", "qk_norm_after"})

PREFIX = ("prefix_k", "prefix_v")  # (prefix, kv_heads·head)
LONGEST_PREFIX = 2**16


@register("attention")
class Attention(SoftmaxMixer):
    """Scaled dot-product attention (MHA, MQA, GQA) with QK-norm, soft-cap, sink, gate and biases."""

    TAPS = {
        "q": "pos head channel",
        "k": "pos kv_head channel",
        "v": "pos kv_head channel",
        "keys": "key kv_head channel",
        "values": "key kv_head channel",
        "pattern": "head query key",
        "z": "pos head channel",
        "gate": "pos channel",
        "out": "pos channel",
    }

    heads: int = bounded(8, above=0, widens=True)
    kv_heads: int | None = bounded(None, above=0, widens=True)  # None: as many as heads
    head: int | None = bounded(None, above=0)  # None: width / heads
    mask: Mask = child("causal")
    position: Position = child("rope")
    scale: float | None = bounded(None, above=0)  # None: 1/√head
    bias: bool = False
    out_bias: bool = False
    packed: bool = False  # one matmul for q, k and v
    qk_norm: Norm | None = None
    qk_norm_whole: bool = False  # over all heads at once, rather than each alone
    qk_norm_after: bool = False  # after the rotation, rather than before it (Hunyuan)
    v_norm: Norm | None = None  # of values, each head alone
    k_is_v: bool = False  # values are the projected keys, before their norm and rotation
    softcap: float | None = bounded(None, above=0, remedy="use null for none")
    sink: bool = False
    prefix: int = bounded(0, at_least=0, at_most=LONGEST_PREFIX)  # learned keys and values before those of the tokens
    gate: bool = False
    earlier: Earlier | None = None  # what it takes from an earlier layer
    dropout: float = bounded(0.0, at_least=0, below=1)

    source = "embed"  # the axis that keys and values are projected from
    attends = True
    values = "values"

    def groups(self) -> int:
        """The number of KV heads."""
        return self.kv_heads or self.heads

    def projects(self) -> bool:
        """Whether it computes keys and values, rather than taking all from an earlier layer."""
        return self.earlier is None or self.earlier.projects

    def axes(self, scope: Scope) -> Scope:
        head = head_size(self.heads, self.head, scope)
        slots = self.heads // max(self.groups(), 1) + 2  # queries of one group, its key and its value
        scope = scope.add(heads=self.heads, kv_heads=self.groups(), head=head, slots=slots)
        return scope.add(prefix=self.prefix) if self.prefix else scope

    def children(self) -> dict[str, Part]:
        names = ("q_norm", "k_norm") if self.projects() else ("q_norm",)
        norms: dict[str, Part] = {} if self.qk_norm is None else dict.fromkeys(names, self.qk_norm)
        norms |= {} if self.v_norm is None else {"v_norm": self.v_norm}
        earlier: dict[str, Part] = {} if self.earlier is None else {"earlier": self.earlier}
        return {"position": self.position, **earlier, **norms}

    def child_scope(self, scope: Scope, child: str) -> Scope:
        scope = self.position_scope(scope)
        if not self.qk_norm_whole or child == "v_norm":
            return scope.bind(dim="head")
        return scope.bind(dim=("heads", "head") if child == "q_norm" else ("kv_heads", "head"))

    def weights(self, scope: Scope) -> list[Weight]:
        x, y = ("embed",), (self.source,)
        q, kv = ("heads", "head"), ("kv_heads", "head")
        if self.packed:
            projections = [("qkv", ("kv_heads", "slots", "head"), x)]
        else:
            projections = [("q", q, x), ("k", kv, y), ("v", kv, y)][: len(self.projected())]
        biased = projections if self.bias else []
        return [
            *(Weight(name=f"{name}.weight", out=out, inp=inp, packs=self.packs("weight")) for name, out, inp in projections),
            *(
                Weight(name=f"{name}.bias", out=out, init="zeros", role="bias", packs=self.packs("bias"))
                for name, out, _ in biased
            ),
            Weight(name="o.weight", out=x, inp=q),
            *([Weight(name="o.bias", out=x, init="zeros", role="bias", tp="once")] if self.out_bias else []),
            *([Weight(name="gate.weight", out=q, inp=x)] if self.gate else []),
            *([Weight(name="sink", out=("heads",), init="zeros", role="gate")] if self.sink else []),
            *(Weight(name=name, batch=("prefix",), out=kv, role="embed") for name in PREFIX if self.prefix),
            self.head_number(),
        ]

    def projected(self) -> tuple[str, ...]:
        """Names of the projections that it has, unless they are packed."""
        return ("q",) if not self.projects() else ("q", "k") if self.k_is_v else ("q", "k", "v")

    def packs(self, leaf: str) -> tuple[str, ...]:
        """The names of the tensors that a packed one replaces."""
        return tuple(f"{name}.{leaf}" for name in "qkv") if self.packed else ()

    def state(self, scope: Scope) -> list[State]:
        owner = None if self.earlier is None or self.projects() else scope.in_layer(self.earlier.layer)
        return self.cached(scope, State(name="kv", axes=("kv_heads", "head"), copies=2, same_as=owner))

    def reads(self, scope: Scope) -> list[Read]:
        if self.earlier is None:
            return []
        return [Read(scope.in_layer(self.earlier.layer), name, ("kv_heads", "head")) for name in self.earlier.names]

    def publishes(self) -> dict[str, tuple[str, ...]]:
        return dict.fromkeys(("k", "v"), ("kv_heads", "head")) if self.projects() else {}

    def needs(self) -> frozenset[str]:
        own = {"softcap": self.softcap is not None, "sink": self.sink, "prefix": self.prefix > 0}
        return self.position.needs() | {name for name, needed in own.items() if needed}

    def cost(self, scope: Scope, n: int) -> tuple[int, int]:
        each = 4 * scope.size("heads", "head")
        return each * n * (n + self.prefix), each * (pairs(self.mask, n) + n * self.prefix)

    def check(self, scope: Scope) -> list[Problem]:
        if wrong := check_heads(self.heads, self.groups(), self.head, scope) or check_position(self.position):
            return wrong
        taken, after, unnormed = not self.projects(), self.qk_norm_after, self.qk_norm is None
        earlier = "keys and values are those of an earlier layer, which projects and norms them"
        on_read = "the norm of keys that are rotated on read belongs to the layer that computes them"
        wide = f"{self.position.kind} gives q and k more channels than the norm has"
        leave = "set qk_norm, or leave this false"
        return broken(
            (self.packed and taken, "packed", "there are no keys and values to pack", "set it to false"),
            (self.packed and self.k_is_v, "k_is_v", "a packed projection has values of its own", "set packed: false"),
            (self.v_norm is not None and taken, "v_norm", earlier, "leave v_norm out"),
            (self.k_is_v and taken, "k_is_v", earlier, "leave k_is_v out"),
            (after and self.position.rotates_on_read() and taken, "qk_norm_after", on_read, "rotate them on write"),
            (self.qk_norm_whole and unnormed, "qk_norm_whole", "there is no qk_norm", leave),
            (after and unnormed, "qk_norm_after", "there is no qk_norm", leave),
            (after and self.position.widens(self.child_scope(scope, "position")), "qk_norm_after", wide, "set it to false"),
        ) + self.check_mask(scope)

    def advise(self, scope: Scope, length: int | None) -> list[Problem]:
        head, reach = scope.size("head"), self.mask.reach()
        drops = reach is not None and self.order() == "causal" and not self.mask.kept() and (length or 0) > reach
        what = f"a window of {reach} without `keep` drops the first tokens, which many heads attend to when streaming"
        return broken(
            (not 32 <= head <= 128, "head", f"a head of {head} is outside the usual 32 to 128", "change heads or head"),
            (drops, "mask", what, "keep a few: {kind: window, size: …, keep: 4}"),
        )

    def taps(self, scope: Scope) -> Mapping[str, str]:
        absent = {*(() if self.gate else ("gate",)), *(() if self.projects() else ("k", "v"))}
        return {name: axes for name, axes in self.TAPS.items() if name not in absent}

    def shifts_keys(self, scope: Scope) -> bool:
        """Whether a learned vector is added to every key just before the scores."""
        if self.qk_norm is None:
            return self.bias and not self.packed and not self.k_is_v
        return any(weight.role == "bias" for weight in self.qk_norm.weights(self.child_scope(scope, "k_norm")))


class AttentionProof(SoftmaxMixerProof, of=Attention):
    """Sampled values, causes, what fields act on, idle fields and exceptions."""

    causes = {
        **SoftmaxMixerProof.causes,
        "position": FieldCause("position missing"),
        "softcap": FieldCause("soft-cap"),
        "qk_norm": FieldCause("qk-norm missing"),
        "qk_norm_whole": FieldCause("qk-norm over all heads"),
        "v_norm": FieldCause("norm of values missing"),
        "mask": FieldCause("mask"),
        **dict.fromkeys(("bias", "out_bias"), FieldCause("bias missing")),
        "gate": FieldCause("output gate missing"),
        **{name: FieldCause(f"{name} missing") for name in ("sink", "prefix")},
    }
    acts_on = {
        **dict.fromkeys(SCORING, ("q", "k", "q_norm", "k_norm")),
        "k_is_v": ("k", "v", "o"),
        **dict.fromkeys(("gate", "v_norm"), ("v", "o")),
    }
    samples = {
        "heads": [6, 4],
        "kv_heads": [2, None, 1],
        "head": [12],
        "scale": [None, 0.4],
        "bias": [False, True],
        "out_bias": [False, True],
        "packed": [False, True],
        "qk_norm_whole": [False, True],
        "qk_norm_after": [False, True],
        "k_is_v": [False, True],
        "softcap": [None, 2.0],
        "sink": [False, True],
        "prefix": [0, 3],
        "gate": [False, True],
        "earlier": [None],  # two layers must agree: sampled with both
        "dropout": [0.0, 0.2],
    }

    def idle(self, part: Attention, scope: Scope) -> frozenset[str]:
        return super().idle(part, scope) | (frozenset() if part.position.rotates else {"qk_norm_after"})

    def excepts(self, part: Attention, scope: Scope) -> dict[str, str]:
        reasons = super().excepts(part, scope)
        shifted = part.qk_norm_after or not part.position.rotates  # the vector is the same for every key
        if shifted and not part.softcap and not part.sink and not part.prefix and part.shifts_keys(scope):
            reasons["every_weight"] = "a vector added to every key shifts all scores of a query alike, and softmax ignores it"
        return reasons


class AttentionModule(SoftmaxModule, of=Attention):
    """x (…, n, embed) -> like x."""

    part: Attention
    q: Linear
    k: Linear
    v: Linear
    qkv: Linear
    gate: Linear
    sink: Tensor
    prefix_k: Tensor
    prefix_v: Tensor
    earlier: EarlierModule
    v_norm: Module

    def setup(self) -> None:
        super().setup()
        self.size, self.slots = self.scope.size("head"), self.scope.size("slots")
        self.scale = self.size**-0.5 if self.part.scale is None else self.part.scale
        self.softcap, self.dropout = self.part.softcap, self.part.dropout
        self.reads, self.projects = self.part.position.rotates_on_read(), self.part.projects()
        self.fused = () if self.part.packed or not self.projects else self.part.projected()

    def forward(self, x: Tensor, ctx: Ctx, view: KVView = WHOLE, values: Values = DISCARDED) -> Tensor:
        q, k, v = self.project(x, ctx) if self.projects else (self.split(self.q(x, ctx)), values["k"], values["v"])
        layout, position, after = ctx.layout, self.position, self.part.qk_norm_after
        v = self.v_norm(v, ctx) if self.part.v_norm is not None else v
        if self.part.qk_norm is not None and not after:
            q, k = self.normed(q, "q_norm", ctx), self.normed(k, "k_norm", ctx)
        q = position.rotate(q, layout)
        k = position.on_write(k, layout) if self.projects else k
        if after:
            q = self.normed(q, "q_norm", ctx)
            k = k if self.reads else self.normed(k, "k_norm", ctx)
        if self.part.earlier is not None:
            k, v = self.earlier(k, v, values)
        if ctx.taps is not None:
            k, v = (ctx.tap(self, "k", k), ctx.tap(self, "v", v)) if self.projects else (k, v)
            q = ctx.tap(self, "q", q)
        if values is not DISCARDED:
            values.publish(k=k, v=v)
        return self.read(x, q, view.append(layout, k, v), ctx)

    def project(self, x: Tensor, ctx: Ctx) -> tuple[Tensor, Tensor, Tensor]:
        """q (…, n, heads, head), k and v (…, n, kv_heads, head)."""
        if not self.part.packed:
            leaves: Any = self._modules
            q, k, *v = map(self.split, multiply_fused(x, ctx, self.fused_weight, *map(leaves.__getitem__, self.fused)))
            return q, k, v[0] if v else k
        groups = self.qkv(x, ctx).unflatten(-1, (-1, self.slots, self.size))
        return groups[..., :-2, :].flatten(-3, -2), groups[..., -2, :], groups[..., -1, :]

    def split(self, x: Tensor) -> Tensor:
        """(…, heads·head) -> (…, heads, head)."""
        return torch.unflatten(x, -1, (-1, self.size))

    def normed(self, x: Tensor, name: str, ctx: Ctx) -> Tensor:
        """QK-norm on q or k (…, n, heads, head): per head, or over all heads together."""
        norm = self.modules_named(name)
        if norm is None:
            return x
        return self.split(norm(x.flatten(-2), ctx)) if self.part.qk_norm_whole else norm(x, ctx)

    def sink_logit(self) -> Tensor | None:
        return self.sink if self.part.sink else None

    def learned_entries(self) -> tuple[Tensor, Tensor] | None:
        if not self.part.prefix:
            return None
        return self.position.placeless(self.split(self.prefix_k)), self.split(self.prefix_v)

    def on_read(self, ctx: Ctx) -> OnRead | None:
        """The rotation of some positions, and a norm that comes after it."""
        if not self.reads or not self.part.qk_norm_after:
            return self.position.on_read if self.reads else None
        return lambda k, layout: self.normed(self.position.on_read(k, layout), "k_norm", ctx)

    def listened(self, kv: KV, ctx: Ctx) -> KV:
        """The entries that the queries read, as the listeners return them."""
        if not (ctx.wants(self, "keys") or ctx.wants(self, "values")):
            return kv
        (k, v), layout = kv.entries()
        return StoredEntries(layout, (ctx.tap(self, "keys", k), ctx.tap(self, "values", v)))

    def read(self, x: Tensor, q: Tensor, kv: KV, ctx: Ctx) -> Tensor:
        """Attend, gate, project back to the residual stream."""
        if ctx.taps is None and ctx.draws is None:
            z = kv.attend(ctx.layout, q, self.scoring(ctx)).flatten(-2)
            return self.o(z * torch.sigmoid(self.gate(x, ctx)) if self.part.gate else z, ctx)
        kv = kv if ctx.taps is None else self.listened(kv, ctx)
        z = ctx.tap(self, "z", kv.attend(ctx.layout, q, self.scoring(ctx), self.edit(ctx))).flatten(-2)
        z = z * torch.sigmoid(ctx.tap(self, "gate", self.gate(x, ctx))) if self.part.gate else z
        return ctx.tap(self, "out", self.o(z, ctx))


@register("cross_attention")
class CrossAttention(CrossMixer, Attention):
    """Queries from the residual stream, keys and values from the encoder output."""

    mask: Mask = child("full")
    position: Position = child("none")

    TAPS = {**Attention.TAPS, "k": "key kv_head channel", "v": "key kv_head channel"}
    source = "encoder"
    own = "attention"

    def state(self, scope: Scope) -> list[State]:
        return [State(name="kv", axes=("kv_heads", "head"), copies=2, per="source")]

    def check(self, scope: Scope) -> list[Problem]:
        if missing := no_encoder(scope):
            return missing
        ordered, no_order = self.position.site != "any" or self.mask.flag() != "all", "a target and its source share no order"
        own = broken(
            (self.earlier is not None, "earlier", "keys and values come from the encoder output", "set it to null"),
            (self.packed, "packed", "q is projected from x, k and v from the encoder output", "set it to false"),
            (ordered, "position", no_order, "use position: none and mask: full"),
        )
        return own + super().check(scope)

    def advise(self, scope: Scope, length: int | None) -> list[Problem]:
        return [p for p in super().advise(scope, length) if p.field == "head"]


class CrossAttentionModule(AttentionModule, CrossModule, of=CrossAttention):
    """x (…, n, embed), encoder output (…, m, encoder) -> like x."""

    def setup(self) -> None:
        super().setup()
        self.fused = self.part.projected()[1:]  # those that read the encoder output

    def forward(self, x: Tensor, ctx: Ctx, view: KVView = WHOLE, values: Values = DISCARDED) -> Tensor:
        q = ctx.tap(self, "q", self.normed(self.split(self.q(x, ctx)), "q_norm", ctx))
        return self.read(x, q, self.kv(x, ctx, view), ctx)

    def entries(self, tokens: Tensor, ctx: Ctx) -> tuple[Tensor, ...]:
        """k, v (…, m, kv_heads, head) of the encoder output."""
        k, *own = map(self.split, multiply_fused(tokens, ctx, self.fused_weight, *map(self.modules_named, self.fused)))
        v = own[0] if own else k
        v = self.v_norm(v, ctx) if self.part.v_norm is not None else v
        return ctx.tap(self, "k", self.normed(k, "k_norm", ctx)), ctx.tap(self, "v", v)
