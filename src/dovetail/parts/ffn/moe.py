"""Mixture of experts (MoE): a router sends each token to a few feed-forwards; a shared expert may process every token.

    out = Σ_{e chosen} weight_e · ffn_e(x)  (+ shared(x), perhaps · σ(x w))           ffn_e(x) = (act(x W_gate) ∘ x W_up) W_down

        x ──┬── router ── chosen, weights ──┐
            ├── bank of experts ────────────┴── Σ ──┐
            └── shared ── (· σ) ────────────────────+── out

With `norm` the experts read norm(x), and the router x itself (Gemma 4). `limit` clamps gate (from above) and up (both ways)
before they are multiplied, and `plus_one` adds 1 to up: with act quick_gelu this is the clamped GLU of gpt-oss. `show` counts
all parameters and the active ones, top_k of `experts`.

With `latent` the experts work in a smaller width: x is projected down for them and their sum up again, while the router and the
shared expert read x itself (Nemotron-H 3).

Under tensor parallel each rank holds whole experts (expert parallel) and computes the tokens sent to them; the output is
all-reduced. The router is replicated.

Shapes: x (…, n, embed)   chosen, weights (…, n, k)   gate, up (experts, ffn, embed)   down (experts, embed, ffn);
with `latent` experts have that axis instead of embed.
Jacobs et al. 1991; Shazeer et al. 2017; Jiang et al. 2024 (Mixtral); Dai et al. 2024 (shared experts).

A dense feed-forward and experts side by side, each between norms of its own, and a norm of their sum.

    y = norm(norm(dense(norm x)) + norm(experts(x)))            added to x; no wire norms around it

Unlike the branches of an `expert_block`, what both compute is normed together. Experts norm their own input (`norm` of `moe`),
so that their router reads x.
Shapes: x, y (…, n, embed). Gemma 4 (2026).
"""

from __future__ import annotations

import dataclasses as dc
from fractions import Fraction
from typing import ClassVar

import torch
from torch import Tensor

from dovetail.nn.ctx import Ctx
from dovetail.nn.groups import Act, Ffn, Norm, Router
from dovetail.nn.linear import Linear
from dovetail.nn.module import Module
from dovetail.ops.expert import by_token, combine, dispatch, gather
from dovetail.spec.field import bounded
from dovetail.spec.part import Part, Problem, broken, child, register
from dovetail.spec.part_proof import FieldCause, Proof
from dovetail.spec.scope import Scope
from dovetail.spec.weight import Weight


@register("moe")
class MoE(Ffn):
    """Mixture of experts: a router, experts, optionally a shared expert."""

    TAPS = {"out": "pos channel"}

    experts: int = bounded(8, at_least=2, remedy="or use a plain ffn")
    hidden: int | None = bounded(None, above=0, widens=True)  # of each expert; None: 4·width
    act: Act = child("silu")
    gated: bool = True
    bias: bool = False
    limit: float | None = bounded(None, above=0, remedy="use null for none")
    plus_one: bool = False
    latent: int | None = bounded(None, above=0, widens=True)  # the width in which experts work; None: the model's
    router: Router = child("softmax_router")
    shared: Ffn | None = None
    shared_gate: bool = False
    norm: Norm | None = None  # of what the experts read; the router reads x

    def children(self) -> dict[str, Part]:
        optional = {"norm": self.norm, "shared": self.shared}
        there = {name: part for name, part in optional.items() if part is not None}
        return {"router": self.router, "bank": Bank(of=self), **there}

    def axes(self, scope: Scope) -> Scope:
        scope = scope.add(ffn=4 * scope.size("embed") if self.hidden is None else self.hidden)
        scope = scope if self.latent is None else scope.add(latent=self.latent)
        return scope.add(gates=1) if self.shared_gate else scope

    def child_scope(self, scope: Scope, child: str) -> Scope:
        below = scope.bind(dim="embed")
        return below.add(experts=self.experts) if child == "router" else below

    def weights(self, scope: Scope) -> list[Weight]:
        embed, latent = ("embed",), ("latent",)
        both = [
            Weight(name="to_latent.weight", out=latent, inp=embed),
            Weight(name="from_latent.weight", out=embed, inp=latent),
        ]
        return [
            *([Weight(name="shared_gate.weight", out=("gates",), inp=embed)] if self.shared_gate else []),
            *([] if self.latent is None else both),
        ]

    def check(self, scope: Scope) -> list[Problem]:
        field = "plus_one" if self.limit is None else "limit"
        changes_gate = self.limit is not None or self.plus_one
        return broken(
            (changes_gate and not self.gated, field, "needs a gated expert", "set gated: true"),
            (self.shared_gate and self.shared is None, "shared_gate", "there is no shared expert to gate", "set `shared`"),
            (isinstance(self.shared, MoE), "shared", "a shared expert has no router", "use glu or mlp"),
        )


class MoEProof(Proof, of=MoE):
    """Sampled values and causes."""

    causes = {"act": FieldCause("activation")}
    samples = {
        "experts": [4, 6],
        "hidden": [20, 12],
        "gated": [True, False],
        "bias": [False, True],
        "limit": [None, 0.8],
        "plus_one": [False, True],
        "latent": [None, 16],
        "shared": [None, {"kind": "glu", "hidden": 36}],
        "shared_gate": [False, True],
    }


class MoEModule(Module, of=MoE):
    """x (…, n, embed) -> like x."""

    part: MoE
    router: Module
    bank: Module
    shared: Module
    shared_gate: Linear
    to_latent: Linear
    from_latent: Linear
    norm: Module

    def forward(self, x: Tensor, ctx: Ctx) -> Tensor:
        chosen, weights = self.router(x, ctx)
        x = x if self.part.norm is None else self.norm(x, ctx)
        if self.part.latent is None:
            out = self.bank(x, ctx, chosen, weights)
        else:
            out = self.from_latent(self.bank(self.to_latent(x, ctx), ctx, chosen, weights), ctx)
        if self.part.shared is not None:
            shared = self.shared(x, ctx)
            out = out + (shared * torch.sigmoid(self.shared_gate(x, ctx)) if self.part.shared_gate else shared)
        return ctx.tap(self, "out", out)


@dc.dataclass(frozen=True, kw_only=True)
class Bank(Part):
    """The experts, without the router: ranks shard these and replicate the router."""

    kind: ClassVar[str] = "bank"
    group: ClassVar[str] = "bank"
    TAPS = {"experts": "pos choice channel", "out": "pos channel"}

    of: MoE

    tp_region = True

    def children(self) -> dict[str, Part]:
        return {}

    def axes(self, scope: Scope) -> Scope:
        return scope.add(experts=self.of.experts, ffn=scope.size("ffn"))  # its own axes, for sharding

    def weights(self, scope: Scope) -> list[Weight]:
        experts, inner, outer = ("experts",), ("ffn",), ("embed",) if self.of.latent is None else ("latent",)
        used = Fraction(self.of.router.choices(), self.of.experts)
        first = ("gate", "up") if self.of.gated else ("up",)
        bias = {"batch": experts, "init": "zeros", "role": "bias", "used": used}
        return [
            *(Weight(name=f"{name}.weight", batch=experts, out=inner, inp=outer, used=used) for name in first),
            Weight(name="down.weight", batch=experts, out=outer, inp=inner, used=used),
            *(Weight(name=f"{name}.bias", out=inner, **bias) for name in first if self.of.bias),
            *([Weight(name="down.bias", out=outer, tp="once", **bias)] if self.of.bias else []),
            Weight(name="expert_number", out=experts, role="const", dtype="int64"),
        ]

    def constant(self, name: str, scope: Scope) -> Tensor:
        return torch.arange(self.of.experts)


class BankModule(Module, of=Bank):
    """x (…, n, embed or latent), chosen and weights (…, n, k) -> like x."""

    part: Bank
    gate: Linear
    up: Linear
    down: Linear
    expert_number: Tensor

    def setup(self) -> None:
        self.act, self.experts = self.part.of.act.function, self.scope.size("experts")

    def forward(self, x: Tensor, ctx: Ctx, chosen: Tensor, weights: Tensor) -> Tensor:
        of, here, k = self.part.of, len(self.expert_number), chosen.shape[-1]
        rows = dispatch(chosen.reshape(-1, k), self.expert_number[0], here, here == self.experts)
        tokens = gather(x.reshape(-1, x.shape[-1]), rows, k)
        hidden = self.up.grouped(tokens, rows, ctx)
        if of.gated:
            gate = self.gate.grouped(tokens, rows, ctx)
            if of.limit is not None:
                gate, hidden = gate.clamp(max=of.limit), hidden.clamp(-of.limit, of.limit)
            hidden = self.act(gate) * (hidden + 1.0 if of.plus_one else hidden)
        else:
            hidden = self.act(hidden)
        y = by_token(self.down.grouped(hidden, rows, ctx), rows, k)
        if ctx.taps is not None:
            y = ctx.tap(self, "experts", y.view(*chosen.shape, -1)).view(y.shape)
        return ctx.tap(self, "out", combine(y, weights.reshape(-1, k)).to(x.dtype).view(x.shape))


NORMS = ("dense_norm", "dense_post_norm", "experts_post_norm", "post_norm")


@register("dense_and_experts")
class DenseAndExperts(Ffn):
    """A dense feed-forward and experts side by side, normed apart and together (Gemma 4)."""

    TAPS = {"out": "pos channel"}
    norms_itself: ClassVar[bool] = True

    dense: Ffn = child("glu")
    experts: Ffn = child("moe")
    norm: Norm = child("rmsnorm")

    def children(self) -> dict[str, Part]:
        return {"dense": self.dense, "experts": self.experts, **dict.fromkeys(NORMS, self.norm)}

    def child_scope(self, scope: Scope, child: str) -> Scope:
        return scope.bind(dim="embed")

    def check(self, scope: Scope) -> list[Problem]:
        reading = [name for name, part in (("dense", self.dense), ("experts", self.experts)) if part.reads(scope)]
        return [Problem(name, "reads values of the model, which only branches of a block receive") for name in reading]


class DenseAndExpertsProof(Proof, of=DenseAndExperts):
    """Sampled values."""

    samples = {
        "dense": [{"kind": "glu", "hidden": 36}, {"kind": "mlp", "hidden": 44}],
        "experts": [
            {"kind": "moe", "experts": 4, "hidden": 20, "norm": "rmsnorm"},
            {"kind": "moe", "experts": 6, "hidden": 12, "router": {"kind": "softmax_router", "norm": "rmsnorm"}},
        ],
    }


class DenseAndExpertsModule(Module, of=DenseAndExperts):
    """x (…, n, embed) -> like x."""

    dense: Module
    experts: Module
    dense_norm: Module
    dense_post_norm: Module
    experts_post_norm: Module
    post_norm: Module

    def forward(self, x: Tensor, ctx: Ctx) -> Tensor:
        dense = self.dense_post_norm(self.dense(self.dense_norm(x, ctx), ctx), ctx)
        experts = self.experts_post_norm(self.experts(x, ctx), ctx)
        return ctx.tap(self, "out", self.post_norm(dense + experts, ctx))
