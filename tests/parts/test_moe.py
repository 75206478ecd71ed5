"""MoE and routers: equal to the blocks of transformers, balanced in training, saved completely."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock, load_balancing_loss_func
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from dovetail.files.model_dir import save
from dovetail.files.spec import from_yaml
from dovetail.hf.load import load
from dovetail.model.construction import build
from dovetail.model.model import Model, ModelModule
from dovetail.nn.ctx import Ctx, Listener, Losses
from dovetail.nn.draws import Draws
from dovetail.nn.groups import RouterModule
from dovetail.nn.layout import TokenLayout
from dovetail.nn.module import holder, make
from dovetail.spec.check import problems
from dovetail.spec.fold import active_parameters, declared, parameters
from dovetail.spec.part import KINDS, walk
from dovetail.spec.scope import Scope

WIDTH, HIDDEN, EXPERTS = 28, 36, 6


def ours(ffn: str, weights: dict[str, Tensor]) -> nn.Module:
    """The part in float32 with these weights, every one of them, by path."""
    weights = dict(weights)
    (block,) = from_yaml(f"layers: [{{ffn: {ffn}}}]").layers
    assert block.ffn is not None
    scope = Scope(sizes={"embed": WIDTH})
    module = make(block.ffn, scope).to_empty(device="cpu")
    for path, part, inside in walk(block.ffn, scope):
        for weight in part.weights(inside):
            name = f"{path}.{weight.name}".lstrip(".")
            value = part.constant(weight.name, inside) if weight.role == "const" else weights.pop(name)
            assert value.shape == weight.shape(inside)
            owner, leaf = holder(module, name)
            if weight.buffer:
                owner.register_buffer(leaf, value)
            else:
                owner.register_parameter(leaf, nn.Parameter(value.clone()))
    assert not weights, f"no such weights: {sorted(weights)}"
    return module


def drawn(module: nn.Module) -> Any:
    """The reference's block with weights that have opinions."""
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in [*module.parameters(), *module.buffers()]:
            p.copy_(torch.randn(p.shape, generator=draw) * (0.05 if p.dim() == 1 else 1.5 * p.shape[-1] ** -0.5))
    return module.eval()


def halves(fused: Tensor) -> dict[str, Tensor]:
    """Their gate and up in one, taken apart."""
    gate, up = fused.detach().chunk(2, 1)
    return {"bank.gate.weight": gate, "bank.up.weight": up}


@torch.no_grad()
def compare(mine: nn.Module, theirs: nn.Module, batch: int = 2, n: int = 9) -> None:
    x = torch.randn(batch, n, WIDTH, generator=torch.Generator().manual_seed(1))
    got, want = mine(x, Ctx(layout=TokenLayout.whole(batch, n))), theirs(x)
    want = want[0] if isinstance(want, tuple) else want
    assert want.abs().max() > 0.1
    assert torch.allclose(got, want, atol=2e-5 * float(want.abs().max())), (got - want).abs().max()


def test_mixtral() -> None:
    sizes = {"hidden_size": WIDTH, "intermediate_size": HIDDEN, "num_local_experts": EXPERTS}
    block = drawn(MixtralSparseMoeBlock(hf.MixtralConfig(**sizes, num_experts_per_tok=2)))
    weights = {**halves(block.experts.gate_up_proj), "bank.down.weight": block.experts.down_proj.detach()}
    weights["router.out.weight"] = block.gate.weight.detach()
    compare(ours(f"{{kind: moe, experts: {EXPERTS}, hidden: {HIDDEN}}}", weights), block)


@pytest.mark.parametrize("normalized", [True, False])
def test_qwen3(normalized: bool) -> None:
    sizes = {"hidden_size": WIDTH, "moe_intermediate_size": HIDDEN, "num_experts": EXPERTS}
    block = drawn(Qwen3MoeSparseMoeBlock(hf.Qwen3MoeConfig(**sizes, num_experts_per_tok=3, norm_topk_prob=normalized)))
    weights = {**halves(block.experts.gate_up_proj), "bank.down.weight": block.experts.down_proj.detach()}
    router = f"{{kind: softmax_router, top_k: 3, normalize: {str(normalized).lower()}}}"
    spec = f"{{kind: moe, experts: {EXPERTS}, hidden: {HIDDEN}, router: {router}}}"
    compare(ours(spec, {**weights, "router.out.weight": block.gate.weight.detach()}), block)


def test_qwen2_with_a_shared_expert_behind_a_gate() -> None:
    sizes = {"hidden_size": WIDTH, "moe_intermediate_size": HIDDEN, "num_experts": EXPERTS, "num_experts_per_tok": 2}
    block = drawn(Qwen2MoeSparseMoeBlock(hf.Qwen2MoeConfig(**sizes, shared_expert_intermediate_size=44, norm_topk_prob=False)))
    weights = {**halves(block.experts.gate_up_proj), "bank.down.weight": block.experts.down_proj.detach()}
    common = {
        f"shared.{name}.weight": getattr(block.shared_expert, f"{name}_proj").weight.detach() for name in ("gate", "up", "down")
    }
    spec = (
        f"{{kind: moe, experts: {EXPERTS}, hidden: {HIDDEN}, router: {{kind: softmax_router, normalize: false}}, "
        "shared: {kind: glu, hidden: 44}, shared_gate: true}"
    )
    gates = {"router.out.weight": block.gate.weight.detach(), "shared_gate.weight": block.shared_expert_gate.weight.detach()}
    compare(ours(spec, {**weights, **common, **gates}), block)


def test_deepseek_v3_with_groups_a_balancing_bias_and_a_shared_expert() -> None:
    sizes = {"hidden_size": WIDTH, "moe_intermediate_size": HIDDEN, "n_routed_experts": 12, "num_experts_per_tok": 4}
    more = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "n_shared_experts": 2, "norm_topk_prob": True}
    config = hf.DeepseekV3Config(**sizes, **more)
    block = drawn(DeepseekV3MoE(config))
    weights = {**halves(block.experts.gate_up_proj), "bank.down.weight": block.experts.down_proj.detach()}
    common = {
        f"shared.{name}.weight": getattr(block.shared_experts, f"{name}_proj").weight.detach()
        for name in ("gate", "up", "down")
    }
    router = "{kind: sigmoid_router, top_k: 4, scale: 2.5, groups: 4, top_groups: 2, balance_bias: true}"
    spec = f"{{kind: moe, experts: 12, hidden: {HIDDEN}, router: {router}, shared: {{kind: glu, hidden: {2 * HIDDEN}}}}}"
    bias = block.gate.e_score_correction_bias.detach()
    assert bias.abs().max() > 0.01
    routing = {"router.out.weight": block.gate.weight.detach(), "router.balance": bias}
    compare(ours(spec, {**routing, **weights, **common}), block, batch=3, n=21)


def test_gpt_oss_with_its_clamped_glu() -> None:
    config = hf.GptOssConfig(
        hidden_size=WIDTH, intermediate_size=HIDDEN, num_local_experts=EXPERTS, num_experts_per_tok=2, swiglu_limit=0.5
    )
    block = drawn(GptOssMLP(config))
    theirs, fused, bias = block.experts, block.experts.gate_up_proj.detach(), block.experts.gate_up_proj_bias.detach()
    weights = {
        "bank.gate.weight": fused[..., ::2].transpose(1, 2).contiguous(),
        "bank.up.weight": fused[..., 1::2].transpose(1, 2).contiguous(),
        "bank.down.weight": theirs.down_proj.detach().transpose(1, 2).contiguous(),
        "bank.gate.bias": bias[:, ::2],
        "bank.up.bias": bias[:, 1::2],
        "bank.down.bias": theirs.down_proj_bias.detach(),
        "router.out.weight": block.router.weight.detach(),
        "router.out.bias": block.router.bias.detach(),
    }
    spec = (
        f"{{kind: moe, experts: {EXPERTS}, hidden: {HIDDEN}, act: quick_gelu, bias: true, limit: 0.5, plus_one: true, "
        "router: {kind: softmax_router, bias: true}}"
    )
    compare(ours(spec, weights), block)


# -- losses --------------------------------------------------------------------------------------------------------------


def small(router: str, layers: int = 1) -> Model:
    return from_yaml(f"""
width: {WIDTH}
vocab: 62
layers:
- repeat: {layers}
  mixer: {{heads: 2, head: 12}}
  ffn: {{kind: moe, experts: {EXPERTS}, hidden: 20, router: {{{router}}}}}
""")


def routers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, RouterModule)]


def test_the_balance_loss_is_that_of_transformers_and_ignores_padding() -> None:
    torch.manual_seed(0)
    router = KINDS["softmax_router"](top_k=2, balance_loss=1.0)
    module = make(router, Scope(sizes={"embed": WIDTH, "experts": EXPERTS})).to_empty(device="cpu")
    nn.init.normal_(module.out.weight)
    x, layout = torch.randn(3, 11, WIDTH), TokenLayout.padded([11, 4, 7], 11)
    losses: dict[str, Tensor] = {}
    module(x, Ctx(layout=layout, losses=Losses(losses)))
    logits = (x @ module.out.weight.T).flatten(0, 1)
    want = load_balancing_loss_func((logits,), EXPERTS, 2, layout.real.to(torch.float32))
    (got,) = losses.values()
    assert torch.allclose(got, want, atol=1e-6)
    (slope,), (theirs,) = torch.autograd.grad(got, module.out.weight), torch.autograd.grad(want, module.out.weight)
    assert slope.abs().max() > 1e-3
    assert torch.allclose(slope, theirs, atol=1e-6)
    x[~layout.real] = 50.0
    module(x, Ctx(layout=layout, losses=Losses(losses)))
    assert torch.allclose(next(iter(losses.values())), got)


def test_losses_are_added_where_they_are_asked_for() -> None:
    spec = small("kind: softmax_router, balance_loss: 0.5, z_loss: 0.25", layers=2)
    model, tokens = build(spec), torch.arange(24).view(2, 12)
    losses: dict[str, Tensor] = {}
    x, ctx = model.hidden(tokens, Ctx(layout=TokenLayout.whole(2, 12)))
    plain = model.head.loss(x, tokens, ctx).mean()
    whole = model.loss(tokens, tokens, Ctx(layout=TokenLayout.whole(2, 12), losses=Losses(losses)))
    assert sorted(losses) == [f"layers.{i}.ffn.router.{name}" for i in (0, 1) for name in ("balance", "z")]
    assert torch.allclose(whole, plain + sum(losses.values()))
    assert losses["layers.0.ffn.router.balance"] >= 0.5 * 2 * 0.9  # even work is top_k


def test_losses_come_through_a_compiled_block() -> None:
    model = build(small("kind: sigmoid_router, balance_loss: 0.5, balance_bias: true, noise: 0.3, capacity: 1.25"))
    block, x = model.layers[0], torch.randn(2, 7, WIDTH)
    want: dict[str, Tensor] = {}
    block(x, Ctx(layout=TokenLayout.whole(2, 7), losses=Losses(want), draws=Draws(3)), {})
    load = routers(model)[0].load.clone()
    got: dict[str, Tensor] = {}
    torch.compiler.reset()
    torch.compile(block, backend="eager", fullgraph=True)(
        x, Ctx(layout=TokenLayout.whole(2, 7), losses=Losses(got), draws=Draws(3)), {}
    )
    torch.compiler.reset()
    assert got.keys() == want.keys() == {"layers.0.ffn.router.balance"}
    assert torch.allclose(got["layers.0.ffn.router.balance"], want["layers.0.ffn.router.balance"])
    assert load.sum() == 28
    assert torch.equal(routers(model)[0].load, 2 * load)


# -- training alone --------------------------------------------------------------------------------------------------------


def route(model: ModelModule, x: Tensor, seed: int | None, layout: TokenLayout | None = None) -> tuple[Tensor, Tensor]:
    draws = None if seed is None else Draws(seed)
    return routers(model)[0](x, Ctx(layout=layout or TokenLayout.whole(*x.shape[:2]), draws=draws))


def test_noise_is_drawn_from_the_seed_in_training_alone() -> None:
    model, x = build(small("kind: softmax_router, noise: 1.0, normalize: false")), torch.randn(2, 30, WIDTH)
    (quiet, _), (again, _) = route(model, x, None), route(model, x, None)
    assert torch.equal(quiet, again)
    (one, same), (two, also) = route(model, x, 5), route(model, x, 5)
    assert torch.equal(one, two)
    assert torch.equal(same, also)
    assert not torch.equal(one, route(model, x, 6)[0])
    assert not torch.equal(one, quiet)


def test_noise_is_normal() -> None:
    model = build(small("kind: softmax_router"))
    drawn = Draws(4).noise(
        Ctx(layout=TokenLayout.whole(50, 70)), torch.zeros(50, 70, WIDTH, dtype=torch.float64), 2.0, model.layers[0], "noise"
    )
    assert abs(float(drawn.mean())) < 0.03
    assert abs(float(drawn.std()) - 2.0) < 0.02
    assert abs(float((drawn.abs() < 2.0).double().mean()) - 0.6827) < 0.005
    assert abs(float((drawn[..., 1:] * drawn[..., :-1]).mean())) < 0.05


def test_capacity_drops_late_tokens_in_training_and_padding_takes_no_room() -> None:
    model, x = build(small("kind: softmax_router, capacity: 1.0")), torch.randn(2, 30, WIDTH)
    layout = TokenLayout.padded([30, 12], 30, left=True)
    chosen, weights = route(model, x, 1, layout)
    kept = torch.zeros(EXPERTS, dtype=torch.long).scatter_add(
        0, chosen[layout.real].flatten(), (weights[layout.real] > 0).flatten().long()
    )
    asked = torch.zeros(EXPERTS, dtype=torch.long).scatter_add(
        0, chosen[layout.real].flatten(), torch.ones(84, dtype=torch.long)
    )
    assert torch.equal(kept, asked.clamp(max=14))  # 42 tokens · 2 choices / 6 experts
    assert (asked > 14).any()
    moved = x.clone()
    moved[~layout.real] = 9.0
    assert torch.equal(route(model, moved, 1, layout)[1][layout.real], weights[layout.real])
    assert bool((route(model, x, None, layout)[1] > 0).all())


def test_a_balancing_bias_is_state_and_no_parameter(tmp_path: Path) -> None:
    spec = small("kind: sigmoid_router, balance_bias: true")
    without = spec.set("layers.*.ffn.router.balance_bias", False)
    assert parameters(spec) == parameters(without)
    assert active_parameters(spec) == active_parameters(without)
    model = build(spec, dtype=torch.bfloat16)
    (router,) = routers(model)
    assert "layers.0.ffn.router.balance" not in dict(model.named_parameters())
    assert not any("balance" in d.path for d in declared(spec) if d.weight.learned)
    assert router.balance.dtype == torch.float32, "a step of 0.001 is lost in bfloat16"
    assert "layers.0.ffn.router.balance" in model.state_dict()
    assert "layers.0.ffn.router.load" not in model.state_dict()
    route(model, torch.randn(1, 50, WIDTH, dtype=torch.bfloat16), 1)
    load_, before = router.load.clone(), router.balance.clone()
    assert load_.sum() == 100
    router.rebalance()
    assert torch.equal(router.balance - before, 0.001 * torch.sign(load_.mean() - load_))
    save(model, spec, tmp_path / "m")
    back = load(tmp_path / "m")
    assert torch.equal(routers(back)[0].balance, router.balance)
    assert routers(back)[0].balance.dtype == torch.float32
    assert back.layers[0].ffn.bank.up.weight.dtype == torch.bfloat16
    assert not routers(back)[0].balance.requires_grad


# -- errors ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ffn", "field", "word"),
    [
        ("experts: 1", "experts", "1 is not at least 2"),
        ("hidden: 0", "hidden", "not above 0"),
        ("limit: -1.0", "limit", "not above 0"),
        ("gated: false, limit: 2.0", "limit", "needs a gated expert"),
        ("gated: false, plus_one: true", "plus_one", "needs a gated expert"),
        ("shared_gate: true", "shared_gate", "no shared expert"),
        ("shared: moe", "shared", "a shared expert has no router"),
        ("router: {kind: softmax_router, top_k: 9}", "router.top_k", "9 is more than the 8 experts"),
        ("router: {kind: softmax_router, groups: 3}", "router.groups", "does not divide 8"),
        ("router: {kind: softmax_router, top_groups: 2}", "router.top_groups", "one group"),
        ("router: {kind: sigmoid_router, groups: 4, top_groups: 4}", "router.top_groups", "4 is not between 1 and 3"),
        ("router: {kind: softmax_router, groups: 4, top_groups: 2}", "router.top_groups", "has no effect"),
        ("router: {kind: sigmoid_router, groups: 8}", "router.groups", "best 2"),
        ("router: {kind: sigmoid_router, groups: 4, top_k: 3}", "router.top_k", "fewer than 3 experts"),
        ("router: {kind: softmax_router, top_k: 8, balance_loss: 0.1}", "router.balance_loss", "the load is always even"),
        ("router: {kind: softmax_router, noise: -0.1}", "router.noise", "-0.1 is not at least 0"),
        ("router: {kind: softmax_router, capacity: 0.0}", "router.capacity", "not above 0"),
    ],
)
def test_errors_name_the_field(ffn: str, field: str, word: str) -> None:
    spec = from_yaml(f"layers: [{{mixer: {{heads: 8}}, ffn: {{kind: moe, {ffn}}}}}]")
    ((path, problem), *_) = problems(spec)
    assert path == f"layers.0.ffn.{field}"
    assert word in problem.problem


# -- a run -----------------------------------------------------------------------------------------------------------------


def usage(model: ModelModule, tokens: Tensor) -> list[Tensor]:
    """The share of choices each expert has, by layer."""
    found: list[Tensor] = []

    def hear(_: str, chosen: Tensor) -> None:
        found.append(torch.bincount(chosen.flatten(), minlength=EXPERTS) / chosen.numel())

    model(tokens, Ctx(layout=TokenLayout.whole(*tokens.shape), taps=Listener({"*.router.chosen": hear})))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("router", "even"),
    [
        ("kind: softmax_router", False),
        ("kind: softmax_router, balance_loss: 0.05", True),
        ("kind: sigmoid_router, balance_bias: true", True),
    ],
)
def test_usage_stays_balanced_in_training(router: str, even: bool) -> None:
    """A text of a few frequent tokens, from a start where one expert is everyone's first choice."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = build(small(router + ", bias: true", layers=2))
    with torch.no_grad():
        for one in routers(model):
            one.out.bias[0] += 1.0
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    draw = torch.Generator().manual_seed(1)

    def text() -> Tensor:
        rare = torch.rand(8, 33, generator=draw).pow(3).mul(62).long()
        rare[:, 1::2] = (rare[:, ::2][:, :16] * 7 + 3) % 62  # every second token follows from the one before
        return rare

    first = None
    for step in range(250):
        tokens = text()
        ctx = Ctx(layout=TokenLayout.whole(8, 32), draws=Draws(step), losses=Losses())
        loss = model.loss(tokens[:, :-1], tokens[:, 1:], ctx)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for one in routers(model):
            one.rebalance(rate=0.01)
        first = loss.item() if first is None else first
    assert loss.item() < first - 0.8
    with torch.no_grad():
        shares = torch.stack(usage(model, torch.cat([text()[:, :-1] for _ in range(8)])))
    worst = float(shares.max()) * EXPERTS  # 1 is even; 3 is the most that two choices of six can be
    assert (worst < 1.6) == even, shares
    assert (float(shares.min()) * EXPERTS > 0.4) or not even, shares


def test_the_capacity_of_an_expert_is_exact_in_bfloat16() -> None:
    model = build(small("kind: softmax_router, top_k: 1, capacity: 0.5"), dtype=torch.bfloat16)
    router = model.layers[0].ffn.router
    chosen, ctx = torch.zeros(1, 9000, 1, dtype=torch.long), Ctx(layout=TokenLayout.whole(1, 9000))
    room = -(-9000 * 0.5 // router.experts)  # more than the 256 that bfloat16 counts to
    assert router.within_capacity(chosen, 0.5, ctx).sum() == room > 256
