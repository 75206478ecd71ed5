"""Seeded bugs of MoE and routers: dispatch, weights, balance losses, capacity, expert parallel."""

from __future__ import annotations

import dataclasses as dc
from typing import Any

import torch
from torch import Tensor

from dovetail.model.model import Model
from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout
from dovetail.ops import expert
from dovetail.parallel import shard
from dovetail.parts.ffn import moe
from dovetail.parts.ffn.moe import Bank, BankModule, MoEModule
from dovetail.parts.ffn.router import SigmoidRouter, SoftmaxRouterModule, TopKModule
from dovetail.proof.laws.mutant import Mutant, instead, spec
from dovetail.proof.laws.suite import OWN_NUMBER
from dovetail.spec.scope import Scope
from dovetail.spec.weight import Weight

_add_loss, _choose, _weights, _looped = Ctx.add_loss, TopKModule.choose, Bank.weights, expert.looped
_dispatch, _combine, _forward, _count = moe.dispatch, moe.combine, TopKModule.forward, TopKModule.count
_within_capacity, _whole, _by_token = TopKModule.within_capacity, MoEModule.forward, moe.by_token
_bank, _grouped, _looped_op, _enter = BankModule.forward, expert.grouped, expert._looped_op, shard.enter


def loss_without_gradient(self: Ctx, module: Any, name: str, loss: Tensor) -> None:
    _add_loss(self, module, name, loss.detach())


def loss_of_uniform_probs(self: SoftmaxRouterModule, scores: Tensor) -> Tensor:
    return torch.full_like(scores, 1 / scores.shape[-1])


def loss_never_added(self: TopKModule, logits: Tensor, scores: Tensor, chosen: Tensor, ctx: Ctx) -> None:
    return None


def padding_counted(self: TopKModule, logits: Tensor, scores: Tensor, chosen: Tensor, ctx: Ctx) -> None:
    layout = ctx.layout
    _count(self, logits, scores, chosen, dc.replace(ctx, layout=type(layout)(layout.coords, layout.order, None, layout.row)))


def next_expert(chosen: Tensor, first: Tensor, experts: int, all_local: bool) -> expert.SortedRows:
    return _dispatch((chosen + 1) % experts, first, experts, all_local)


def never_normalized(self: TopKModule, x: Tensor, ctx: Ctx) -> tuple[Tensor, Tensor]:
    original = self.part
    self.part = dc.replace(original, normalize=False)
    try:
        return _forward(self, x, ctx)
    finally:
        self.part = original


def weights_in_another_order(y: Tensor, weights: Tensor) -> Tensor:
    return _combine(y, weights.flip(-1))


def outputs_sorted_by_expert(y: Tensor, rows: expert.SortedRows, choices: int) -> Tensor:
    return _by_token(y, rows._replace(choice=torch.arange(y.shape[0])), choices)


def router_reads_the_norm(self: MoEModule, x: Tensor, ctx: Ctx) -> Tensor:
    return _whole(self, x if self.part.norm is None else self.norm(x, ctx), ctx)


def expert_scale_before_normalizing(self: TopKModule, x: Tensor, ctx: Ctx) -> tuple[Tensor, Tensor]:
    chosen, weights = _forward(self, x, ctx)
    return chosen, weights / weights.sum(-1, keepdim=True) if self.part.expert_scale else weights


def balance_changes_weights(self: TopKModule, x: Tensor, ctx: Ctx) -> tuple[Tensor, Tensor]:
    chosen, weights = _forward(self, x, ctx)
    return chosen, weights + self.balance[chosen] if self.part.balance_bias else weights


def balance_ignored(self: TopKModule, scores: Tensor) -> Tensor:
    original = self.part
    self.part = dc.replace(original, balance_bias=False)
    try:
        return _choose(self, scores)
    finally:
        self.part = original


def balance_never_stored(self: Weight) -> bool:
    return self.learned


def every_expert_is_active(self: Bank, scope: Scope) -> list[Weight]:
    return [dc.replace(weight, used=type(weight.used)(1)) for weight in _weights(self, scope)]


def numbered_from_zero(self: BankModule, x: Tensor, ctx: Ctx, chosen: Tensor, weights: Tensor) -> Tensor:
    original = self.expert_number
    self.expert_number = torch.arange(len(original))
    try:
        return _bank(self, x, ctx, chosen, weights)
    finally:
        self.expert_number = original


def router_gradient_of_one_rank(x: Tensor, group: Any) -> Tensor:
    return x.view_as(x) if x.shape[-1] == 2 else _enter(x, group)


def first_expert_has_no_gradient(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return _looped(x, torch.cat([weights[:1].detach(), weights[1:]]), ends)


def next_expert_in_the_loop(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return _looped_op(x, weights.roll(1, 0), ends)


def next_expert_in_the_kernel(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return _grouped(x, weights.roll(1, 0), ends)


def groups_ignored(self: TopKModule, scores: Tensor) -> Tensor:
    original = self.part
    self.part = dc.replace(original, groups=1, top_groups=1)
    try:
        return _choose(self, scores)
    finally:
        self.part = original


def other_groups_at_zero(self: TopKModule, scores: Tensor) -> Tensor:
    part = self.part
    if part.groups == 1:
        return _choose(self, scores)
    ranked = (scores.detach() + (self.balance if part.balance_bias else 0.0)).unflatten(-1, (part.groups, -1))
    best = ranked.topk(part.best, -1).values.sum(-1).topk(part.top_groups, -1).indices
    inside = torch.zeros(ranked.shape[:-1], dtype=torch.bool).scatter(-1, best, True)
    return ranked.masked_fill(~inside[..., None], 0.0).flatten(-2).topk(part.top_k, -1).indices


def capacity_by_token(self: TopKModule, chosen: Tensor, capacity: float, ctx: Ctx) -> Tensor:
    seg = ctx.layout.seg.reshape(-1, 1).repeat(1, chosen.shape[-1]).view(1, -1)
    by_choice = dc.replace(ctx, layout=TokenLayout.of(torch.zeros_like(seg), seg))
    return _within_capacity(self, chosen.reshape(1, -1, 1), capacity, by_choice).view(chosen.shape)


def router_reads_the_latent(self: MoEModule, x: Tensor, ctx: Ctx) -> Tensor:
    if self.part.latent is None:
        return _whole(self, x, ctx)
    chosen, weights = self.router(self.from_latent(self.to_latent(x, ctx), ctx), ctx)
    return self.from_latent(self.bank(self.to_latent(x, ctx), ctx, chosen, weights), ctx)


def experts(kind: str = "softmax_router", **fields: Any) -> Model:
    """A small Mixtral with this router."""
    router = {"kind": kind, **fields}
    return spec().set("layers.*.ffn", {"kind": "moe", "experts": 4, "hidden": 20, "router": router})


def mutants() -> list[Mutant]:
    """The seeded bugs of this area."""
    plain, balanced = experts(), experts(balance_loss=0.5, z_loss=0.1)
    biased = experts("sigmoid_router", balance_bias=True)
    limited = experts("sigmoid_router", groups=2)
    return [
        Mutant(
            "a router's balance loss has no gradient", "gradient", instead(Ctx, "add_loss", loss_without_gradient), balanced
        ),
        Mutant(
            "a balance loss does not depend on the probs",
            OWN_NUMBER,
            instead(SoftmaxRouterModule, "probs", loss_of_uniform_probs),
            balanced,
        ),
        Mutant("a balance loss is never added", "every_field", instead(TopKModule, "count", loss_never_added), balanced),
        Mutant("padding counts in a balance loss", OWN_NUMBER, instead(TopKModule, "count", padding_counted), balanced),
        Mutant("tokens go to the next expert", OWN_NUMBER, instead(moe, "dispatch", next_expert), plain),
        Mutant(
            "weights of the chosen experts are not normalized",
            OWN_NUMBER,
            instead(TopKModule, "forward", never_normalized),
            plain,
        ),
        Mutant("weights of two choices are exchanged", OWN_NUMBER, instead(moe, "combine", weights_in_another_order), plain),
        Mutant(
            "a router reads the latent of its experts",
            OWN_NUMBER,
            instead(MoEModule, "forward", router_reads_the_latent),
            plain.set("layers.*.ffn.latent", 16),
        ),
        Mutant("outputs stay sorted by expert", "causal", instead(moe, "by_token", outputs_sorted_by_expert), plain),
        Mutant(
            "the router reads what the experts read, normed",
            OWN_NUMBER,
            instead(MoEModule, "forward", router_reads_the_norm),
            plain.set("layers.*.ffn.norm", "rmsnorm"),
        ),
        Mutant(
            "factors of experts are normalized with their weights",
            OWN_NUMBER,
            instead(TopKModule, "forward", expert_scale_before_normalizing),
            experts(expert_scale=True),
        ),
        Mutant(
            "a balancing bias changes the weights of experts",
            OWN_NUMBER,
            instead(TopKModule, "forward", balance_changes_weights),
            biased,
        ),
        Mutant(
            "a balancing bias does not change the choice", OWN_NUMBER, instead(TopKModule, "choose", balance_ignored), biased
        ),
        Mutant(
            "a balancing bias is not saved", "round_trip", instead(Weight, "stored", property(balance_never_stored)), biased
        ),
        Mutant("groups do not limit the choice", "every_field", instead(TopKModule, "choose", groups_ignored), limited),
        Mutant(
            "experts of other groups have score 0", OWN_NUMBER, instead(TopKModule, "choose", other_groups_at_zero), limited
        ),
        Mutant("a group is scored by its best expert only", OWN_NUMBER, instead(SigmoidRouter, "best", 1), limited),
        Mutant("every expert counts as active", "declared", instead(Bank, "weights", every_expert_is_active), plain),
        Mutant("an expert is never trained", "every_weight", instead(expert, "looped", first_expert_has_no_gradient), plain),
        Mutant(
            "every rank numbers its experts from 0",
            "sharded",
            instead(BankModule, "forward", numbered_from_zero),
            plain,
        ),
        Mutant(
            "a router gets the gradient of one rank's experts",
            "sharded",
            instead(shard, "enter", router_gradient_of_one_rank),
            plain,
        ),
        Mutant(
            "the compiled loop uses the next expert", "compiled", instead(expert, "_looped_op", next_expert_in_the_loop), plain
        ),
        Mutant(
            "capacity is filled token by token, not by choice",
            OWN_NUMBER,
            instead(TopKModule, "within_capacity", capacity_by_token),
            experts(capacity=0.5),
        ),
        Mutant("torch's kernel uses the next expert", OWN_NUMBER, instead(expert, "grouped", next_expert_in_the_kernel), plain),
    ]
