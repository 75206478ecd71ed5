"""Oracles of MoE and routers, computed by hand.

Logits are logarithms of small integers, so that probs are tenths. Expert e computes (e + 1)·x², with the channels moved by one;
the last expert gives ten times as much.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dovetail.nn.ctx import Ctx, Losses
from dovetail.nn.draws import Draws
from dovetail.nn.layout import TokenLayout
from dovetail.ops.expert import dispatch
from dovetail.proof.laws.oracle import Comparison, alone, ctx, eye, numbers, oracle, part

LN2, LN3, LN4, LN5, LN9 = 0.6931471805599453, 1.0986122886681098, 1.3862943611198906, 1.6094379124341003, 2.1972245773362196
# token (1, 0): 4, 2, 1, 3 tenths for the experts; token (0, 1): 1, 1, 5, 3 tenths
TENTHS = [[LN4, 0.0], [LN2, 0.0], [0.0, LN5], [LN3, LN3]]
# token (1, 0): σ is 0.9, 0.1, 0.75, 0.5: the best expert is in the group with the lower sum
SINGLE = [[LN9, 0.0], [-LN9, 0.0], [LN3, 0.0], [0.0, 0.0]]
ONE, OTHER = [[[1.0, 0.0]]], [[[0.0, 1.0]]]
ON = [[0.0, 0.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0]]  # (a, b, c, d) -> (d, a, b, c)


def route(kind: str, weight: Any, x: Any, extra: dict[str, Any] | None = None, **fields: Any) -> tuple[Tensor, Tensor]:
    """The chosen experts, in ascending order, and their weights."""
    chosen, weights = alone(part(kind, **fields), {"out.weight": weight, **(extra or {})}, embed=2, experts=4)(
        numbers(x), ctx(len(x[0]))
    )
    chosen, order = chosen.sort(-1)
    return chosen, weights.gather(-1, order)


@oracle("softmax_router")
def softmax() -> Iterator[Comparison]:
    """Probs of 4, 2, 1, 3 tenths: experts 0 and 3, normalized to 4/7 and 3/7."""
    chosen, weights = route("softmax_router", TENTHS, ONE)
    yield Comparison("the two greatest", chosen, [[[0, 3]]], near=0)
    yield Comparison("softmax over the chosen", weights, [[[4 / 7, 3 / 7]]])
    yield Comparison("softmax before choosing", route("softmax_router", TENTHS, ONE, normalize=False)[1], [[[0.4, 0.3]]])
    yield Comparison("scaled", route("softmax_router", TENTHS, ONE, normalize=False, scale=2.5)[1], [[[1.0, 0.75]]])
    soft = route("softmax_router", TENTHS, ONE, top_k=4)[1]
    yield Comparison("soft routing", soft, [[[0.4, 0.2, 0.1, 0.3]]])
    chosen, weights = route("softmax_router", TENTHS, ONE, groups=2)  # group (0, 1) has the best expert
    yield Comparison("the group of the best expert", chosen, [[[0, 1]]], near=0)
    yield Comparison("and its weights", weights, [[[2 / 3, 1 / 3]]])
    # the bias of the matmul changes the probs: 4, 4, 1, 3; the balancing bias only the choice: 0.4, 0.5, 0.1, 0.3
    counts = route("softmax_router", TENTHS, ONE, {"out.bias": [0.0, LN2, 0.0, 0.0]}, bias=True, normalize=False)
    yield Comparison("a bias", counts[1], [[[1 / 3, 1 / 3]]])
    chosen, weights = route(
        "softmax_router", TENTHS, ONE, {"balance": [0.0, 0.3, 0.0, 0.0]}, balance_bias=True, normalize=False
    )
    yield Comparison("a balancing bias", chosen, [[[0, 1]]], near=0)
    yield Comparison("does not change the weights", weights, [[[0.4, 0.2]]])
    less = {"balance": [-1.0] * 4}
    chosen, _ = route("softmax_router", TENTHS, ONE, less, groups=2, balance_bias=True)
    yield Comparison("scores below 0 stay in the best group", chosen, [[[0, 1]]], near=0)


@oracle("softmax_router", "sigmoid_router")
def normed() -> Iterator[Comparison]:
    """(3, 0) has the norm (√2, 0), by (1, 2) and then by ½√2 it is (1, 0) again; a factor of each expert's weight."""
    fields = {"norm": part("rmsnorm", eps=1e-30), "input_scale": 0.5**0.5}
    scale = {"norm.scale": [1.0, 2.0]}
    chosen, weights = route("softmax_router", TENTHS, [[[3.0, 0.0]]], scale, **fields)
    yield Comparison("the two greatest of a normed token", chosen, [[[0, 3]]], near=0)
    yield Comparison("and their weights", weights, [[[4 / 7, 3 / 7]]])
    # (0, 3): (0, 2√2) by ½√2 is (0, 2): the logits of (0, 1) twice, so 1, 1, 25, 9 of 36
    weights = route("softmax_router", TENTHS, [[[0.0, 3.0]]], scale, normalize=False, **fields)[1]
    yield Comparison("the scale of the norm", weights, [[[25 / 36, 9 / 36]]])
    factors = {"expert_scale": [7.0, 1.0, 1.0, 14.0]}
    yield Comparison("a factor per expert", route("softmax_router", TENTHS, ONE, factors, expert_scale=True)[1], [[[4.0, 6.0]]])
    factors = {"expert_scale": [2.0, 1.0, 4.0, 1.0]}
    scaled = route("sigmoid_router", SINGLE, ONE, factors, expert_scale=True, normalize=False)[1]
    yield Comparison("of a sigmoid", scaled, [[[1.8, 3.0]]])


@oracle("sigmoid_router")
def sigmoid() -> Iterator[Comparison]:
    """Scores 0.9, 0.1, 0.75, 0.5."""
    chosen, weights = route("sigmoid_router", SINGLE, ONE, normalize=False)
    yield Comparison("the two greatest", chosen, [[[0, 2]]], near=0)
    yield Comparison("scores are not normalized", weights, [[[0.9, 0.75]]])
    chosen, weights = route("sigmoid_router", SINGLE, ONE, groups=2, scale=2.5)  # 0.9 + 0.1 < 0.75 + 0.5
    yield Comparison("the group with the larger sum of its best two", chosen, [[[2, 3]]], near=0)
    yield Comparison("normalized and scaled", weights, [[[1.5, 1.0]]])
    balanced = {"balance": [0.0, 0.9, 0.0, 0.0]}  # 0.9 + 1.0 > 0.75 + 0.5
    chosen, weights = route("sigmoid_router", SINGLE, ONE, balanced, groups=2, balance_bias=True)
    yield Comparison("a balancing bias changes the group", chosen, [[[0, 1]]], near=0)
    yield Comparison("does not change the weights", weights, [[[0.9, 0.1]]])
    # 2 less for every expert changes no order: −1.1, −1.9, −1.25, −1.5
    less = {"balance": [-2.0] * 4}
    chosen, weights = route("sigmoid_router", SINGLE, ONE, less, groups=2, balance_bias=True, normalize=False)
    yield Comparison("scores below 0 stay in the best group", chosen, [[[2, 3]]], near=0)
    yield Comparison("and keep their weights", weights, [[[0.75, 0.5]]])
    # probs of the two chosen experts, by the sum of scores, 2.25: 0.9/2.25 and 0.75/2.25
    losses = added("sigmoid_router", SINGLE, ONE, TokenLayout.whole(1, 1), balance_loss=1.0)
    yield Comparison("balance loss: 4·(0.4 + 1/3)", losses[".balance"], 2.9333333333)


def added(kind: str, weight: Any, x: Any, layout: TokenLayout, **fields: Any) -> dict[str, Tensor]:
    """The losses that a router adds."""
    losses: dict[str, Tensor] = {}
    alone(part(kind, **fields), {"out.weight": weight}, embed=2, experts=4)(
        numbers(x), Ctx(layout=layout, losses=Losses(losses))
    )
    return losses


@oracle("softmax_router")
def balance() -> Iterator[Comparison]:
    """Choices per token: ½, 0, ½, 1; mean probs: 0.25, 0.15, 0.3, 0.3; 4·(0.125 + 0.15 + 0.3) = 2.3; Σ e^logit is 10."""
    x = [[[1.0, 0.0], [0.0, 1.0], [7.0, 7.0]]]
    for name, tokens, layout in (
        ("two tokens", [x[0][:2]], TokenLayout.whole(1, 2)),
        ("padding does not count", x, TokenLayout.padded([2], 3)),
    ):
        losses = added("softmax_router", TENTHS, tokens, layout, balance_loss=0.5, z_loss=0.1)
        yield Comparison(f"balance loss, {name}", losses[".balance"], 1.15)
        yield Comparison(f"z-loss, {name}: 0.1·(ln 10)²", losses[".z"], 0.53018981)
    module = alone(part("softmax_router", balance_bias=True), {"out.weight": TENTHS, "balance": [0.0] * 4}, embed=2, experts=4)
    module(numbers(x), Ctx(layout=TokenLayout.padded([2], 3)))
    yield Comparison("load in evaluation", module.load, [0.0] * 4)
    module(numbers(x), Ctx(layout=TokenLayout.padded([2], 3), draws=Draws(1)))
    yield Comparison("load in training", module.load, [1.0, 0.0, 1.0, 2.0])
    module.rebalance()  # the mean is 1
    yield Comparison("bias after rebalance", module.balance, [0.0, 0.001, 0.0, -0.001])
    yield Comparison("load after rebalance", module.load, [0.0] * 4)
    # five tokens for expert 0, one for expert 2; each has a capacity of ⌈0.8 · 6 / 4⌉ = 2; padding takes none
    full = alone(part("softmax_router", top_k=1, capacity=0.8), {"out.weight": TENTHS}, embed=2, experts=4)
    rows = numbers([[[1.0, 0.0], *[[1.0, 0.0]] * 4, [0.0, 1.0], [1.0, 0.0]]])
    late = TokenLayout.of(torch.arange(7)[None], torch.tensor([[-1, 0, 0, 0, 0, 0, 0]]))
    yield Comparison(
        "within capacity", full(rows, Ctx(layout=late, draws=Draws(1)))[1].flatten()[1:], [1.0, 1.0, 0.0, 0.0, 1.0, 0.0]
    )
    yield Comparison("no capacity in evaluation", full(rows, Ctx(layout=late))[1].flatten(), [1.0] * 7)
    both = alone(part("softmax_router", top_k=2, capacity=0.5), {"out.weight": TENTHS}, embed=2, experts=4)
    weights = both(numbers([ONE[0] * 2 + OTHER[0]]), Ctx(layout=TokenLayout.whole(1, 3), draws=Draws(1)))[
        1
    ]  # a capacity of one
    yield Comparison("first choices before second ones", weights, [[[4 / 7, 3 / 7], [0.0, 0.0], [5 / 8, 0.0]]])
    # token (1, 1) has 4, 2, 5, 9 twentieths: its first choice, expert 3, comes before the second choice of the token before it
    weights = both(numbers([[[1.0, 0.0], [1.0, 1.0]]]), Ctx(layout=TokenLayout.whole(1, 2), draws=Draws(1)))[1]
    yield Comparison("first choices of later tokens too", weights, [[[4 / 7, 0.0], [9 / 14, 5 / 14]]])


# -- experts -----------------------------------------------------------------------------------------------------------


def bank(**fields: Any) -> tuple[Any, dict[str, Any]]:
    """An MoE of four experts with four channels, and its weights."""
    spec = part("moe", experts=4, hidden=4, **{"act": part("identity"), **fields})
    wide = [[*row, 0.0, 0.0] for row in TENTHS]
    weights = {
        "router.out.weight": wide,
        "bank.up.weight": [eye(4, e + 1.0) for e in range(4)],
        "bank.down.weight": [[[v * (10.0 if e == 3 else 1.0) for v in row] for row in ON] for e in range(4)],
    }
    return spec, weights | ({"bank.gate.weight": [eye(4)] * 4} if spec.gated else {})


@oracle("moe")
def chosen_and_summed() -> Iterator[Comparison]:
    """(1, 0, 0, 0): 4/7·1 + 3/7·4·10 = 124/7; (0, 1, 0, 0): 5/8·3 + 3/8·4·10 = 16.875; each moved by one channel."""
    spec, weights = bank()
    x = numbers([[[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]]])
    want = [[[0.0, 124 / 7, 0.0, 0.0], [0.0, 0.0, 16.875, 0.0]]]
    module = alone(spec, weights, embed=4)
    yield Comparison("two experts per token, weighted", module(x, ctx(2)), want)
    yield Comparison("the same by torch's kernel", module.to(torch.float32)(x.to(torch.float32), ctx(2)), want)
    soft, weights = bank(router=part("softmax_router", top_k=4))  # 0.4·1 + 0.2·2 + 0.1·3 + 0.3·40
    yield Comparison("all experts", alone(soft, weights, embed=4)(x[:, :1], ctx(1)), [[[0.0, 13.1, 0.0, 0.0]]])
    plain, weights = bank(gated=False, act=part("relu2"))  # (e + 1)²: 4/7·1 + 3/7·16·10
    yield Comparison("not gated", alone(plain, weights, embed=4)(x[:, :1], ctx(1)), [[[0.0, 484 / 7, 0.0, 0.0]]])


@oracle("moe")
def in_a_latent() -> Iterator[Comparison]:
    """(1, 0, 0, 0) is (2, 1) for the experts: 4/7·1 + 3/7·4 = 16/7 of it, spread over four channels; the router reads x."""
    spec = part("moe", experts=4, hidden=2, latent=2, gated=False, act=part("identity"))
    weights = {
        "router.out.weight": [[*row, 0.0, 0.0] for row in TENTHS],
        "to_latent.weight": [[2.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]],
        "bank.up.weight": [eye(2, e + 1.0) for e in range(4)],
        "bank.down.weight": [eye(2)] * 4,
        "from_latent.weight": [[0.0, 1.0], [1.0, 0.0], [0.0, 0.0], [1.0, 1.0]],
    }
    x = numbers([[[1.0, 0.0, 0.0, 0.0]]])
    want = [16 / 7, 32 / 7, 0.0, 48 / 7]
    yield Comparison("experts in a latent", alone(spec, weights, embed=4)(x, ctx(1)), [[want]])
    common = {"shared.up.weight": eye(4), "shared.down.weight": eye(4, 6.0)}
    both = dc.replace(spec, shared=part("mlp", hidden=4, act=part("identity"), bias=False))
    out = alone(both, {**weights, **common}, embed=4)(x, ctx(1))
    yield Comparison("the shared expert reads x", out, [[[6 + 16 / 7, *want[1:]]]])


@oracle("moe")
def expert_parallel() -> Iterator[Comparison]:
    """Experts 2 and 3 are on this rank, 0 and 5 on others: rows are sorted by expert, those of other ranks at the end."""
    chosen = torch.tensor([[3, 0], [2, 5]])
    rows = dispatch(chosen, torch.tensor(2), 2, all_local=False)
    yield Comparison("sorted by expert, those of other ranks at the end", rows.choice.tolist(), [2, 0, 1, 3])
    yield Comparison("numbered from the first expert of this rank", rows.expert.tolist(), [0, 1, 1, 1])
    yield Comparison("on this rank", rows.local is not None and rows.local.flatten().tolist(), [True, True, False, False])
    yield Comparison("ends of each expert", rows.ends.tolist(), [1, 2])
    scope = alone(part("rmsnorm"), {"scale": [1.0]}, embed=1).scope.add(embed=3)
    yield Comparison("hidden size: four times the width", float(part("moe").axes(scope).size("ffn")), 12.0)


@oracle("moe")
def around() -> Iterator[Comparison]:
    """Biases, the clamped GLU of gpt-oss, and a shared expert behind σ(0) = ½."""
    spec, weights = bank(bias=True, router=part("softmax_router", top_k=1))  # expert 0: (1 + 2)·(1 + 1) + 5, then + 6 elsewhere
    biases = {
        "bank.gate.bias": [[2.0, 0.0, 0.0, 0.0]] + [[9.0] * 4] * 3,
        "bank.up.bias": [[1.0, 0.0, 0.0, 0.0]] + [[9.0] * 4] * 3,
        "bank.down.bias": [[0.0, 5.0, 6.0, 0.0]] + [[9.0] * 4] * 3,
    }
    x = numbers([[[1.0, 0.0, 0.0, 0.0]]])
    yield Comparison(
        "biases of the chosen expert", alone(spec, {**weights, **biases}, embed=4)(x, ctx(1)), [[[0.0, 11.0, 6.0, 0.0]]]
    )
    clamped, weights = bank(limit=7.0, plus_one=True, act=part("quick_gelu"), router=part("softmax_router", top_k=1))
    weights["bank.gate.weight"], weights["bank.up.weight"] = [eye(4, 8.0)] * 4, [eye(4, -9.0)] * 4
    out = alone(clamped, weights, embed=4)(x, ctx(1))  # 7·σ(1.702·7)·(1 − 7); the others: 0·(1 + 0)
    yield Comparison("clamped", out, [[[0.0, -41.99971877, 0.0, 0.0]]])
    weights["bank.gate.weight"], weights["bank.up.weight"] = [eye(4, -8.0)] * 4, [eye(4, 9.0)] * 4
    out = alone(clamped, weights, embed=4)(x, ctx(1))  # the gate is not clamped from below: −8·σ(−13.616)·(7 + 1)
    yield Comparison("the gate is clamped from above only", out, [[[0.0, -7.81314309e-05, 0.0, 0.0]]])
    spec, weights = bank(shared=part("glu", hidden=4, act=part("identity")), shared_gate=True)
    common = {"shared.gate.weight": eye(4), "shared.up.weight": eye(4, 6.0), "shared.down.weight": eye(4)}
    gated = {**weights, **common, "shared_gate.weight": [[0.0] * 4]}
    yield Comparison("a shared expert", alone(spec, gated, embed=4)(x, ctx(1)), [[[3.0, 124 / 7, 0.0, 0.0]]])
    bare = alone(dc.replace(spec, shared_gate=False), {**weights, **common}, embed=4)
    yield Comparison("without a gate", bare(x, ctx(1)), [[[6.0, 124 / 7, 0.0, 0.0]]])
    # (2, 0, 0, 0) is its own norm, by ½: the experts read (1, 0, 0, 0), and the router 2·(1, 0, 0, 0): 16/25 and 9/25
    own, weights = bank(norm=part("rmsnorm", eps=1e-30))
    weights = {**weights, "norm.scale": [0.5, 1.0, 1.0, 1.0]}
    yield Comparison("the experts read norm(x)", alone(own, weights, embed=4)(2 * x, ctx(1)), [[[0.0, 376 / 25, 0.0, 0.0]]])
