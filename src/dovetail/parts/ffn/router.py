"""Routers of an MoE: the experts that each token is sent to, and their weights.

    s = softmax(x W)  or  σ(x W)            chosen = the k greatest of s + balance           weight_e = scale · s_e (/ Σ chosen)

A softmax over all experts, normalized over the chosen ones, equals the softmax over the chosen ones (Mixtral); not normalized,
it is the form of Qwen2-MoE and Switch. With top_k = experts the routing is soft. All of it is computed in float32 or wider.

    groups       experts form groups, and only the best `top_groups` groups are used. The score of a group is that of its best
                 expert (softmax), or the sum of its best two (sigmoid)                                    DeepSeek-V2, -V3
    norm         x is normed first, and multiplied by `input_scale`                                        Gemma 4
    expert_scale one learned number per expert, a factor of its weight                                     Gemma 4
    noise        in training, normal noise added to x W                                                    Shazeer et al. 2017
    balance_loss experts · Σ_e (choices of e per token)·(mean prob of e); k where the load is even         Fedus et al. 2021
    z_loss       the mean of (log Σ_e e^{x W_e})²: keeps the logits small                                  Zoph et al. 2022
    balance_bias one number per expert, added to the scores for the choice alone. It has no gradient: after each training step
                 it rises for experts with less than the mean load and falls for the others                Wang et al. 2024
    capacity     in training, an expert takes at most capacity times the mean load; first choices come before second choices,
                 and choices beyond the capacity have weight 0                                             Lepikhin et al. 2020

Losses, load and capacity are those of the whole batch, however ranks split it. Padding neither counts nor takes capacity.
Shapes: x (…, n, embed)   logits, s (…, n, experts)   chosen, weights (…, n, top_k).
"""

from __future__ import annotations

import dataclasses as dc
from typing import ClassVar

import torch
from torch import Tensor

from dovetail.nn.ctx import Ctx
from dovetail.nn.groups import Norm, Router, RouterModule
from dovetail.nn.linear import Linear
from dovetail.nn.module import Module, at_least_fp32
from dovetail.spec.field import MAX_FACTOR, bounded
from dovetail.spec.part import Problem, broken, register
from dovetail.spec.part_proof import FieldCause, Proof
from dovetail.spec.scope import Scope
from dovetail.spec.weight import Weight

RATE = 0.001  # change of the balancing bias per step (Wang et al. 2024)


@dc.dataclass(frozen=True, kw_only=True)
class TopK(Router):
    """The base of routers that score every expert and choose the best `top_k`."""

    TAPS = {"logits": "pos expert", "chosen": "pos choice", "weights": "pos choice"}

    top_k: int = bounded(2, above=0)
    normalize: bool = True  # weights of the chosen sum to `scale`
    scale: float = bounded(1.0, above=0)
    bias: bool = False
    norm: Norm | None = None  # of what it reads
    input_scale: float = bounded(1.0, above=0, at_most=MAX_FACTOR)
    expert_scale: bool = False
    groups: int = bounded(1, above=0)
    top_groups: int = bounded(1, above=0)
    noise: float = bounded(0.0, at_least=0, remedy="use 0 for none")
    balance_loss: float = bounded(0.0, at_least=0, remedy="use 0 for none")
    z_loss: float = bounded(0.0, at_least=0, remedy="use 0 for none")
    balance_bias: bool = False
    capacity: float | None = bounded(None, above=0, remedy="use null for no limit")

    best: ClassVar[int]  # the number of experts whose scores sum to the score of a group

    def choices(self) -> int:
        return self.top_k

    def weights(self, scope: Scope) -> list[Weight]:
        experts = ("experts",)
        balance = [
            Weight(name="balance", out=experts, init="zeros", role="updated"),
            Weight(name="load", out=experts, role="const"),
        ]
        return [
            Weight(name="out.weight", out=experts, inp=("embed",), readout=True),
            *([Weight(name="out.bias", out=experts, init="zeros", role="bias")] if self.bias else []),
            *([Weight(name="expert_scale", out=experts, init="ones", role="gate")] if self.expert_scale else []),
            *(balance if self.balance_bias else []),
        ]

    def constant(self, name: str, scope: Scope) -> Tensor:
        return torch.zeros(scope.size("experts"))

    def check(self, scope: Scope) -> list[Problem]:
        experts = scope.size("experts")
        if self.top_k > experts:
            return [Problem("top_k", f"{self.top_k} is more than the {experts} experts")]
        even = "every token chooses every expert, so the load is always even"
        all_chosen = bool(self.balance_loss) and self.top_k == experts
        return broken((all_chosen, "balance_loss", even, "use 0 for none")) + self.check_groups(experts)

    def check_groups(self, experts: int) -> list[Problem]:
        """The problems of `groups` and `top_groups`: they must divide the experts and limit the choice."""
        groups, best, size = self.groups, self.top_groups, max(experts // self.groups, 1)
        several, chosen = groups > 1, self.top_k
        few = f"a group of {size} experts has no best {self.best}, whose scores sum to the group's"
        idle = f"the best {chosen} experts are always in the best {chosen} groups, so this has no effect"
        return broken(
            (experts % groups, "groups", f"{groups} does not divide {experts} experts", ""),
            (not several and best != 1, "top_groups", "there is one group", "set `groups`"),
            (
                several and best >= groups,
                "top_groups",
                f"{best} is not between 1 and {groups - 1}",
                "use fewer than all groups",
            ),
            (several and size < self.best, "groups", few, "use fewer groups"),
            (several and self.best == 1 and best >= chosen, "top_groups", idle, "use fewer than top_k"),
            (several and chosen > best * size, "top_k", f"{best} groups of {size} experts are fewer than {chosen} experts", ""),
        )[:1]

    def only_chooses(self) -> bool:
        """Whether the scores only choose: a single normalized expert has weight 1 whatever its score."""
        return self.top_k == 1 and self.normalize and not self.balance_loss and not self.z_loss


class TopKProof(Proof, of=TopK):
    """Sampled values, causes, fields of training, idle fields and exceptions."""

    causes = {
        "normalize": FieldCause("router's weights"),
        "scale": FieldCause("router's weights"),
        "top_k": FieldCause("experts per token"),
    }
    training_only = frozenset({"noise", "balance_loss", "z_loss", "capacity"})
    samples = {
        "top_k": [2, 1, 4],
        "normalize": [True, False],
        "scale": [1.0, 1.7],
        "bias": [False, True],
        "input_scale": [1.0, 0.4],
        "expert_scale": [False, True],
        "groups": [1, 2, 3],
        "top_groups": [1, 2],
        "noise": [0.0, 2.5],
        "balance_loss": [0.0, 0.03],
        "z_loss": [0.0, 0.01],
        "balance_bias": [False, True],
        "capacity": [None, 0.1],
    }

    def idle(self, part: TopK, scope: Scope) -> frozenset[str]:
        # they scale the logits of a token alike
        return frozenset({"input_scale", "norm.eps"} if part.only_chooses() else ())

    def excepts(self, part: TopK, scope: Scope) -> dict[str, str]:
        single = "a single normalized expert has weight 1 whatever its score"
        excepted = {"every_weight": f"{single}, so no gradient reaches the router"} if part.only_chooses() else {}
        if part.norm is not None and part.top_k == 1 and part.normalize and not (part.bias or part.balance_bias):
            excepted |= {"looking.norm.scale": f"{single}, and the scale of a norm leaves the order of the scores"}
        return excepted


class TopKModule(RouterModule):
    """x (…, n, embed) -> chosen (…, n, top_k), weights (…, n, top_k)."""

    part: TopK
    out: Linear
    norm: Module
    expert_scale: Tensor
    balance: Tensor
    load: Tensor

    def setup(self) -> None:
        self.experts = self.scope.size("experts")

    def scores(self, logits: Tensor) -> Tensor:
        """Logits (…, experts) -> scores above 0."""
        raise NotImplementedError

    def probs(self, scores: Tensor) -> Tensor:
        """Scores (…, experts) -> probs, which sum to 1."""
        raise NotImplementedError

    def forward(self, x: Tensor, ctx: Ctx) -> tuple[Tensor, Tensor]:
        part, dtype = self.part, at_least_fp32(x.dtype)
        x = x.to(dtype) if part.norm is None else self.norm(x.to(dtype), ctx)
        logits = self.out(x if part.input_scale == 1.0 else x * part.input_scale, ctx)
        if ctx.draws is not None:
            logits = ctx.draws.noise(ctx, logits, part.noise, self, axes=("experts",))
        logits = ctx.tap(self, "logits", logits)
        scores = self.scores(logits)
        chosen = ctx.tap(self, "chosen", self.choose(scores))
        weights = scores.gather(-1, chosen)
        if part.normalize:
            weights = weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(dtype).tiny)
        if part.scale != 1.0:
            weights = weights * part.scale
        if part.expert_scale:
            weights = weights * self.expert_scale.to(dtype)[chosen]
        self.count(logits, scores, chosen, ctx)
        if part.capacity is not None and ctx.draws is not None:
            weights = weights * self.within_capacity(chosen, part.capacity, ctx)
        return chosen, ctx.tap(self, "weights", weights)

    def choose(self, scores: Tensor) -> Tensor:
        """The indices of the best experts of each token (…, n, top_k)."""
        part = self.part
        ranked = scores.detach()
        if part.balance_bias:
            ranked = ranked + self.balance
        if part.groups > 1:
            grouped = ranked.unflatten(-1, (part.groups, -1))
            group_scores = grouped.topk(part.best, -1).values.sum(-1)
            best_groups = group_scores.topk(part.top_groups, -1).indices
            selected = torch.zeros_like(group_scores, dtype=torch.bool).scatter(-1, best_groups, True)
            ranked = grouped.masked_fill(~selected[..., None], -torch.inf).flatten(-2)
        return ranked.topk(part.top_k, -1).indices

    def count(self, logits: Tensor, scores: Tensor, chosen: Tensor, ctx: Ctx) -> None:
        """Add the router's losses and count the load of each expert; padding counts in neither."""
        part = self.part
        counts_load = part.balance_bias and ctx.draws is not None
        if not counts_load and (ctx.losses is None or not (part.balance_loss or part.z_loss)):
            return
        real = ctx.layout.real.to(scores.dtype)
        sums = [  # over this rank's tokens: their number, choices and probs of each expert, squares of log Σ e^logit
            real.sum()[None],
            (torch.zeros_like(scores).scatter(-1, chosen, 1.0) * real[..., None]).flatten(0, -2).sum(0),
            (self.probs(scores) * real[..., None]).flatten(0, -2).sum(0),
            (logits.logsumexp(-1).square() * real).sum()[None],
        ]
        count, choices, probs, squares = ctx.ranks.batch_sum(torch.cat(sums)).split([1, self.experts, self.experts, 1])
        tokens = count.clamp_min(1.0)
        if counts_load:
            with torch.no_grad():
                self.load.add_(choices)
        if part.balance_loss:
            ctx.add_loss(self, "balance", part.balance_loss * self.experts * (choices / tokens * (probs / tokens)).sum())
        if part.z_loss:
            ctx.add_loss(self, "z", part.z_loss * (squares / tokens).sum())

    def within_capacity(self, chosen: Tensor, capacity: float, ctx: Ctx) -> Tensor:
        """(…, n, top_k) 1 for choices within the capacity of their expert, 0 for dropped ones.

        An expert takes first choices before second ones, and within these the tokens row by row.
        """
        n, k = chosen.shape[-2:]
        counted = ctx.layout.real.reshape(-1, n, 1, 1).expand(-1, n, k, 1).long()  # integers: bfloat16 counts to 256
        one_hot = counted.new_zeros(*counted.shape[:3], self.experts).scatter(-1, chosen.reshape(-1, n, k, 1), counted)
        before, total = ctx.ranks.batch_counts(one_hot.sum(1))  # (rows, k, experts), (k, experts)
        earlier = total.cumsum(0) - total  # choices of a lower index, by any token
        place = ((earlier + before[:, None] + one_hot.cumsum(1)) * one_hot).sum(-1)
        limit = torch.ceil(total[0].sum() * (capacity * k / self.experts))  # each token has one first choice
        return (place <= limit).view(chosen.shape)

    @torch.no_grad()
    def rebalance(self, rate: float = RATE) -> None:
        if not self.part.balance_bias:
            return
        self.balance.add_(torch.sign(self.load.mean() - self.load), alpha=rate)
        self.load.zero_()


@register("softmax_router")
class SoftmaxRouter(TopK):
    """Softmax router: scores of all experts sum to 1 (Mixtral, Qwen-MoE)."""

    best = 1


class SoftmaxRouterProof(TopKProof, of=SoftmaxRouter):
    """Idle fields."""

    def idle(self, part: TopK, scope: Scope) -> frozenset[str]:
        # the probs of all experts sum to 1
        return super().idle(part, scope) | ({"normalize"} if part.top_k == scope.size("experts") else set())


class SoftmaxRouterModule(TopKModule, of=SoftmaxRouter):
    """x (…, n, embed) -> chosen, weights (…, n, top_k)."""

    def scores(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1)

    def probs(self, scores: Tensor) -> Tensor:
        return scores


@register("sigmoid_router")
class SigmoidRouter(TopK):
    """Sigmoid router: each expert has a score of its own, from 0 to 1 (DeepSeek-V3)."""

    best = 2


class SigmoidRouterModule(TopKModule, of=SigmoidRouter):
    """x (…, n, embed) -> chosen, weights (…, n, top_k)."""

    def scores(self, logits: Tensor) -> Tensor:
        return logits.sigmoid()

    def probs(self, scores: Tensor) -> Tensor:
        return scores / scores.sum(-1, keepdim=True)
