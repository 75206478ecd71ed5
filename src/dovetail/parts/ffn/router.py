"""Routers: which few of many experts a token goes to, and how much each of them counts.

    s = softmax(x W)  or  σ(x W)            chosen = the k greatest of s + balance           weight_e = scale · s_e (/ Σ chosen)

Softmax over all and then normalized over the chosen is the softmax over the chosen (Mixtral); not normalized, it is the form of
Qwen2-MoE and Switch. With k = all experts nothing is chosen: soft routing. Numbers are float32 at least.

    groups       experts stand in groups; only the `top_groups` best are chosen from. A group is as good as its best expert
                 (softmax) or its best two together (sigmoid)                                              DeepSeek-V2, -V3
    noise        in training, a normal draw added to x W                                                   Shazeer et al. 2017
    balance_loss experts · Σ_e (choices of e a token)·(mean share of e): k where all are chosen alike      Fedus et al. 2021
    z_loss       the mean of (log Σ_e e^{x W_e})²: keeps the logits small                                  Zoph et al. 2022
    balance_bias a number an expert, added where experts are chosen and nowhere else; no gradient moves it: after each step of
                 training it goes up for experts with less than the mean of the work, down for others      Wang et al. 2024
    capacity     in training, an expert takes at most capacity times its even share of the choices, first choices first;
                 the others count 0                                                                        Lepikhin et al. 2020

Losses, load and capacity are those of the whole batch, however ranks split it. Padding is neither counted nor given room.
Shapes: x (…, n, embed)   logits, s (…, n, experts)   chosen, weights (…, n, top_k).
"""

from __future__ import annotations

import dataclasses as dc
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.core.ctx import Ctx
from dovetail.core.group import Router, RouterModule
from dovetail.core.module import Module, at_least_fp32
from dovetail.core.part import Problem, register
from dovetail.core.scope import Scope
from dovetail.core.weight import Weight

RATE = 0.001  # how far a balancing bias goes in one step (Wang et al. 2024)


@dc.dataclass(frozen=True, kw_only=True)
class TopK(Router):
    """What routers that score every expert and take the best have in common."""

    TAPS = ("logits", "chosen", "weights")

    training_only = frozenset({"noise", "balance_loss", "z_loss", "capacity"})

    top_k: int = 2
    normalize: bool = True  # weights of the chosen sum to `scale`
    scale: float = 1.0
    bias: bool = False
    groups: int = 1
    top_groups: int = 1
    noise: float = 0.0
    balance_loss: float = 0.0
    z_loss: float = 0.0
    balance_bias: bool = False
    capacity: float | None = None

    best: ClassVar[int]  # how many of a group's best experts make its score

    def choices(self) -> int:
        return self.top_k

    def weights(self, scope: Scope) -> list[Weight]:
        experts = ("experts",)
        declared = [Weight(name="weight", out=experts, inp=("embed",))]
        if self.bias:
            declared += [Weight(name="bias", out=experts, init="zeros", role="bias")]
        if self.balance_bias:
            declared += [Weight(name="balance", out=experts, init="zeros", role="updated")]
            declared += [Weight(name="load", out=experts, role="const")]
        return declared

    def constant(self, name: str, scope: Scope) -> Tensor:
        return torch.zeros(scope.size("experts"))

    def check(self, scope: Scope) -> list[Problem]:
        experts, none = scope.size("experts"), "use 0 for none"
        if not 1 <= self.top_k <= experts:
            return [Problem("top_k", f"{self.top_k} is not between 1 and {experts}, the number of experts")]
        found = [
            Problem(name, f"{value} is below 0", none)
            for name, value in (("noise", self.noise), ("balance_loss", self.balance_loss), ("z_loss", self.z_loss))
            if value < 0
        ]
        if self.capacity is not None and self.capacity <= 0:
            found.append(Problem("capacity", f"{self.capacity} is not above 0", "use null for no limit"))
        if self.balance_loss and self.top_k == experts:
            found.append(Problem("balance_loss", "every expert is chosen by every token, so there is nothing to balance", none))
        return found + self.check_groups(experts)

    def check_groups(self, experts: int) -> list[Problem]:
        """The problems of `groups` and `top_groups`: they must divide the experts and limit the choice."""
        if self.groups < 1 or experts % self.groups:
            return [Problem("groups", f"{self.groups} does not divide {experts} experts")]
        if self.groups == 1:
            return [] if self.top_groups == 1 else [Problem("top_groups", "there is one group", "set `groups`")]
        size = experts // self.groups
        if not 1 <= self.top_groups < self.groups:
            return [
                Problem("top_groups", f"{self.top_groups} of {self.groups} groups is no limit", "use fewer groups than all")
            ]
        if size < self.best:
            return [Problem("groups", f"groups of {size} are judged by their best {self.best}", "use fewer groups")]
        if self.best == 1 and self.top_groups >= self.top_k:
            what = f"the best {self.top_k} never stand in more than the best {self.top_k} groups, so this is no limit"
            return [Problem("top_groups", what, "use fewer than top_k")]
        if self.top_k > self.top_groups * size:
            return [Problem("top_k", f"{self.top_groups} groups of {size} experts have no {self.top_k} to choose")]
        return []

    @classmethod
    def samples(cls) -> dict[str, list[Any]]:
        return {
            "top_k": [2, 1, 4],
            "normalize": [True, False],
            "scale": [1.0, 1.7],
            "bias": [False, True],
            "groups": [1, 2, 3],
            "top_groups": [1, 2],
            "noise": [0.0, 2.5],
            "balance_loss": [0.0, 0.03],
            "z_loss": [0.0, 0.01],
            "balance_bias": [False, True],
            "capacity": [None, 0.1],
        }

    def excepts(self, scope: Scope) -> dict[str, str]:
        if self.top_k > 1 or not self.normalize or self.balance_loss or self.z_loss:
            return {}
        return {"every_weight": "a single normalized expert has weight 1 whatever its score, so no gradient reaches the router"}


class TopKModule(RouterModule):
    """x (…, n, embed) -> chosen (…, n, top_k), weights (…, n, top_k)."""

    part: TopK
    weight: Tensor
    bias: Tensor
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
        part, kept = self.part, at_least_fp32(x.dtype)
        logits = F.linear(x.to(kept), self.weight.to(kept), self.bias.to(kept) if part.bias else None)
        logits = ctx.tap(self, "logits", ctx.noise(logits, part.noise, self, axes=("experts",)))
        scores = self.scores(logits)
        chosen = ctx.tap(self, "chosen", self.choose(scores))
        weights = scores.gather(-1, chosen)
        if part.normalize:
            weights = weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(kept).tiny)
        if part.scale != 1.0:
            weights = weights * part.scale
        self.count(logits, scores, chosen, ctx)
        if part.capacity is not None and ctx.training:
            weights = weights * self.in_time(chosen, part.capacity, ctx)
        return chosen, ctx.tap(self, "weights", weights)

    def choose(self, scores: Tensor) -> Tensor:
        """The best experts of each token (…, n, top_k)."""
        part = self.part
        ranked = scores.detach()
        if part.balance_bias:
            ranked = ranked + self.balance
        if part.groups > 1:
            grouped = ranked.unflatten(-1, (part.groups, -1))
            worth = grouped.topk(part.best, -1).values.sum(-1)
            among = torch.zeros_like(worth, dtype=torch.bool).scatter(-1, worth.topk(part.top_groups, -1).indices, True)
            ranked = grouped.masked_fill(~among[..., None], -torch.inf).flatten(-2)
        return ranked.topk(part.top_k, -1).indices

    def count(self, logits: Tensor, scores: Tensor, chosen: Tensor, ctx: Ctx) -> None:
        """Add the router's losses and count the load of each expert; padding counts in neither."""
        part = self.part
        loads = part.balance_bias and ctx.training
        if not loads and (ctx.losses is None or not (part.balance_loss or part.z_loss)):
            return
        real = ctx.layout.real.to(scores.dtype)
        mine = [  # of this rank's tokens: how many there are, choices and probs of each expert, squares of log Σ e^logit
            real.sum()[None],
            (torch.zeros_like(scores).scatter(-1, chosen, 1.0) * real[..., None]).flatten(0, -2).sum(0),
            (self.probs(scores) * real[..., None]).flatten(0, -2).sum(0),
            (logits.logsumexp(-1).square() * real).sum()[None],
        ]
        count, choices, probs, squares = ctx.batch_sum(torch.cat(mine)).split([1, self.experts, self.experts, 1])
        tokens = count.clamp_min(1.0)
        if loads:
            with torch.no_grad():
                self.load.add_(choices)
        if part.balance_loss:
            ctx.add_loss(self, "balance", part.balance_loss * self.experts * (choices / tokens * (probs / tokens)).sum())
        if part.z_loss:
            ctx.add_loss(self, "z", part.z_loss * (squares / tokens).sum())

    def in_time(self, chosen: Tensor, capacity: float, ctx: Ctx) -> Tensor:
        """(…, n, top_k) 1 for choices within the capacity of their expert, 0 for dropped ones.

        An expert takes first choices before second ones, and within these the tokens row by row.
        """
        n, k = chosen.shape[-2:]
        waits = ctx.layout.real.reshape(-1, n, 1, 1).expand(-1, n, k, 1).long()  # bfloat16 counts to 256
        asked = waits.new_zeros(*waits.shape[:3], self.experts).scatter(-1, chosen.reshape(-1, n, k, 1), waits)
        before, total = ctx.batch_counts(asked.sum(1))  # (rows, k, experts), (k, experts)
        earlier = total.cumsum(0) - total  # by a choice before this one
        place = ((earlier + before[:, None] + asked.cumsum(1)) * asked).sum(-1)
        room = torch.ceil(total[0].sum() * (capacity * k / self.experts))  # each token has one first choice
        return (place <= room).view(chosen.shape).to(at_least_fp32(self.weight.dtype))

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

    def module(self) -> type[Module]:
        return SoftmaxRouterModule

    def idle(self, scope: Scope) -> frozenset[str]:
        return frozenset({"normalize"} if self.top_k == scope.size("experts") else ())  # they sum to 1 already


class SoftmaxRouterModule(TopKModule):
    """x (…, n, embed) -> chosen, weights (…, n, top_k)."""

    def scores(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1)

    def probs(self, scores: Tensor) -> Tensor:
        return scores


@register("sigmoid_router")
class SigmoidRouter(TopK):
    """Sigmoid router: each expert has a score of its own, from 0 to 1 (DeepSeek-V3)."""

    best = 2

    def module(self) -> type[Module]:
        return SigmoidRouterModule


class SigmoidRouterModule(TopKModule):
    """x (…, n, embed) -> chosen, weights (…, n, top_k)."""

    def scores(self, logits: Tensor) -> Tensor:
        return logits.sigmoid()

    def probs(self, scores: Tensor) -> Tensor:
        return scores / scores.sum(-1, keepdim=True)
