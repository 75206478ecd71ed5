"""DeepSeek-V3 whole: the tiny preset with the reference's weights says what the reference says, decoding by latents too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from dovetail.files.spec import load_spec
from dovetail.model.construction import build
from dovetail.model.model import ModelModule
from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout
from dovetail.state.pool import Pool

TOKENS = torch.randint(512, (2, 17), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def theirs() -> Any:
    config = hf.DeepseekV3Config(
        hidden_size=144,
        vocab_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=6,
        intermediate_size=384,
        kv_lora_rank=40,
        q_lora_rank=64,
        qk_nope_head_dim=24,
        qk_rope_head_dim=16,
        v_head_dim=20,
        first_k_dense_replace=1,
        n_routed_experts=8,
        moe_intermediate_size=48,
        num_experts_per_tok=2,
        n_group=4,
        topk_group=2,
    )
    torch.manual_seed(0)
    model = hf.DeepseekV3ForCausalLM(config).eval()
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if "inv_freq" not in name:
            torch.nn.init.normal_(value, 1.0 if "norm" in name else 0.0, 0.15)
    return model


def taken(theirs: Any) -> ModelModule:
    """Our model with their weights: theirs are packed two by two."""
    ours = build(load_spec("deepseek-tiny"))
    state = {**dict(theirs.named_parameters()), **dict(theirs.named_buffers())}
    found: dict[str, Tensor] = {
        "embed.table": state["model.embed_tokens.weight"],
        "norm.scale": state["model.norm.weight"],
        "head.out.weight": state["lm_head.weight"],
    }
    for i, layer in enumerate(theirs.model.layers):
        attention, here, mlp = layer.self_attn, f"layers.{i}", layer.mlp
        down, turned = attention.kv_a_proj_with_mqa.weight.split([40, 16])
        up = attention.kv_b_proj.weight.unflatten(0, (6, 44))
        found |= {
            f"{here}.mixer_norm.scale": layer.input_layernorm.weight,
            f"{here}.ffn_norm.scale": layer.post_attention_layernorm.weight,
            f"{here}.mixer.q_down.weight": attention.q_a_proj.weight,
            f"{here}.mixer.q_norm.scale": attention.q_a_layernorm.weight,
            f"{here}.mixer.q.weight": attention.q_b_proj.weight,
            f"{here}.mixer.kv_down.weight": down,
            f"{here}.mixer.turned.weight": turned,
            f"{here}.mixer.kv_norm.scale": attention.kv_a_layernorm.weight,
            f"{here}.mixer.k_up.weight": up[:, :24].flatten(0, 1),
            f"{here}.mixer.v_up.weight": up[:, 24:].flatten(0, 1),
            f"{here}.mixer.o.weight": attention.o_proj.weight,
        }
        dense, inside = (mlp, "ffn") if i == 0 else (mlp.shared_experts, "ffn.shared")
        for mine, other in (("gate", dense.gate_proj), ("up", dense.up_proj), ("down", dense.down_proj)):
            found[f"{here}.{inside}.{mine}.weight"] = other.weight
        if i > 0:
            gate, wide = mlp.experts.gate_up_proj.chunk(2, 1)
            found |= {f"{here}.ffn.bank.gate.weight": gate, f"{here}.ffn.bank.up.weight": wide}
            found |= {f"{here}.ffn.bank.down.weight": mlp.experts.down_proj, f"{here}.ffn.router.out.weight": mlp.gate.weight}
            found[f"{here}.ffn.router.balance"] = mlp.gate.e_score_correction_bias
    mine = {**dict(ours.named_parameters()), **dict(ours.named_buffers())}
    assert {name for name, _ in ours.named_parameters()} <= found.keys()
    with torch.no_grad():
        for name, value in found.items():
            mine[name].copy_(value)
    return ours


@torch.no_grad()
def test_logits_are_the_reference_s(theirs: Any) -> None:
    want, ours = theirs(TOKENS).logits, taken(theirs)
    got = ours(TOKENS, Ctx(layout=TokenLayout.whole(2, 17)))
    assert want.std() > 0.3, "a model that says nothing proves nothing"
    assert (got - want).abs().max() < 1e-5 * want.abs().max()


@torch.no_grad()
def test_decoding_by_latents_says_the_same(theirs: Any) -> None:
    want, ours, pool = theirs(TOKENS).logits, taken(theirs), Pool(load_spec("deepseek-tiny"), 2, 17)
    assert pool.bytes() == 2 * 17 * 4 * (40 + 16) * 4
    for begin, end in ((0, 9), (9, 10), (10, 11), (11, 17)):
        step = pool.step([0, 1], [end - begin] * 2)
        got = ours(TOKENS[:, begin:end], Ctx(layout=step.layout, views=step.views))
        assert (got - want[:, begin:end]).abs().max() < 1e-5 * want.abs().max()
