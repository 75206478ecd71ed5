"""Mamba, Mamba-2 and Jamba made by transformers with random weights: the same logits, gradients and greedy tokens from ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from hf_pair import apart
from torch import Tensor

from dovetail.files.spec import from_yaml
from dovetail.model.construction import build
from dovetail.model.model import Model
from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout
from dovetail.nn.module import tensor_at
from dovetail.state.pool import Pool

N = 15
SIZES = {"vocab_size": 62, "num_hidden_layers": 2, "tie_word_embeddings": False}
MAMBA = {"hidden_size": 28, "state_size": 5, "time_step_rank": 7, "layer_norm_epsilon": 1e-2, **SIZES}
MAMBA2 = {"hidden_size": 28, "state_size": 6, "head_dim": 7, "num_heads": 8, "chunk_size": 4, **SIZES}
JAMBA = {
    "hidden_size": 36,
    "intermediate_size": 44,
    "vocab_size": 62,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "attn_layer_period": 4,
    "attn_layer_offset": 3,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "num_experts_per_tok": 2,
    "mamba_d_state": 5,
    "mamba_d_conv": 3,
    "mamba_dt_rank": 7,
    "use_mamba_kernels": False,
}
Names = dict[str, Tensor]  # our path -> their tensor


def mamba_spec(config: Any) -> Model:
    mixer = f"{{kind: mamba, state_size: 5, rank: 7, conv_size: {config.conv_kernel}"
    mixer += f", bias: {config.use_bias}, conv_bias: {config.use_conv_bias}}}"
    return bare_spec(config, mixer.lower())


def mamba2_spec(config: Any) -> Model:
    mixer = f"{{kind: mamba2, head: 7, state_size: 6, groups: {config.n_groups}, conv_size: {config.conv_kernel}"
    mixer += f", bias: {config.use_bias}, conv_bias: {config.use_conv_bias}, norm: {norm_of(config.layer_norm_epsilon)}}}"
    return bare_spec(config, mixer.lower())


def norm_of(eps: float) -> str:
    return f"{{kind: rmsnorm, eps: {eps:.1e}}}"


def bare_spec(config: Any, mixer: str) -> Model:
    norm = norm_of(config.layer_norm_epsilon)
    return from_yaml(f"""
width: {config.hidden_size}
vocab: 62
layers: [{{repeat: 2, mixer: {mixer}, ffn: null, norm: {norm}}}]
norm: {norm}
head: {{kind: lm, tied: false}}
""")


def jamba_spec(config: Any) -> Model:
    norm = norm_of(config.rms_norm_eps)
    mamba = f"{{kind: mamba, state_size: 5, rank: 7, conv_size: 3, norm: {norm}}}"
    experts = "{kind: moe, experts: 4, hidden: 44, router: {kind: softmax_router, normalize: false}}"
    return from_yaml(f"""
width: 36
vocab: 62
layers:
- {{mixer: {mamba}, ffn: {{hidden: 44}}, norm: {norm}}}
- {{mixer: {mamba}, ffn: {experts if config.num_experts > 1 else "{hidden: 44}"}, norm: {norm}}}
- {{mixer: {mamba}, ffn: {{hidden: 44}}, norm: {norm}}}
- mixer: {{heads: 6, kv_heads: 2, position: none}}
  ffn: {experts if config.num_experts > 1 else "{hidden: 44}"}
  norm: {norm}
norm: {norm}
head: {{kind: lm, tied: false}}
""")


def of_mixer(state: Names, theirs: str, ours: str, config: Any) -> Names:
    """A Mamba of theirs, the same in Jamba."""
    x, z = state[f"{theirs}.in_proj.weight"].chunk(2)
    low, b, c = state[f"{theirs}.x_proj.weight"].split([7, 5, 5])
    found = {"x.weight": x, "z.weight": z, "low.weight": low, "b.weight": b, "c.weight": c}
    found |= {"dt.weight": state[f"{theirs}.dt_proj.weight"], "dt_bias": state[f"{theirs}.dt_proj.bias"]}
    found |= {"a_log": state[f"{theirs}.A_log"], "skip": state[f"{theirs}.D"], "o.weight": state[f"{theirs}.out_proj.weight"]}
    found["conv"] = state[f"{theirs}.conv1d.weight"][:, 0]
    if f"{theirs}.conv1d.bias" in state:
        found["conv_bias"] = state[f"{theirs}.conv1d.bias"]
    if f"{theirs}.in_proj.bias" in state:
        found["x.bias"], found["z.bias"] = state[f"{theirs}.in_proj.bias"].chunk(2)
        found["o.bias"] = state[f"{theirs}.out_proj.bias"]
    return {f"{ours}.{name}": tensor for name, tensor in found.items()}


def of_mixer2(state: Names, theirs: str, ours: str, config: Any) -> Names:
    """A Mamba-2 of theirs: z, x, B, C and Δ in one matrix, x, B and C in one convolution."""
    inner, shared = config.num_heads * config.head_dim, config.n_groups * config.state_size
    found: Names = {"a_log": state[f"{theirs}.A_log"], "skip": state[f"{theirs}.D"], "dt_bias": state[f"{theirs}.dt_bias"]}
    found |= {"o.weight": state[f"{theirs}.out_proj.weight"], "norm.scale": state[f"{theirs}.norm.weight"]}
    names, sizes = ("z", "x", "b", "c", "dt"), [inner, inner, shared, shared, config.num_heads]
    for name, tensor in zip(names, state[f"{theirs}.in_proj.weight"].split(sizes), strict=True):
        found[f"{name}.weight"] = tensor
    for name, tensor in zip(names[1:4], state[f"{theirs}.conv1d.weight"][:, 0].split(sizes[1:4]), strict=True):
        found[f"conv_{name}"] = tensor
    if f"{theirs}.conv1d.bias" in state:
        for name, tensor in zip(names[1:4], state[f"{theirs}.conv1d.bias"].split(sizes[1:4]), strict=True):
            found[f"conv_{name}_bias"] = tensor
    return {f"{ours}.{name}": tensor for name, tensor in found.items()}


def of_stack(mixer: Callable[[Names, str, str, Any], Names]) -> Callable[[Names, Any], Names]:
    def names(state: Names, config: Any) -> Names:
        found = {"embed.table": state["backbone.embeddings.weight"], "norm.scale": state["backbone.norm_f.weight"]}
        found["head.out.weight"] = state["lm_head.weight"]
        for i in range(config.num_hidden_layers):
            found[f"layers.{i}.mixer_norm.scale"] = state[f"backbone.layers.{i}.norm.weight"]
            found |= mixer(state, f"backbone.layers.{i}.mixer", f"layers.{i}.mixer", config)
        return found

    return names


def of_jamba(state: Names, config: Any) -> Names:
    found = {"embed.table": state["model.embed_tokens.weight"], "norm.scale": state["model.final_layernorm.weight"]}
    found["head.out.weight"] = state["lm_head.weight"]
    for i in range(4):
        theirs, ours = f"model.layers.{i}", f"layers.{i}"
        found[f"{ours}.mixer_norm.scale"] = state[f"{theirs}.input_layernorm.weight"]
        found[f"{ours}.ffn_norm.scale"] = state[f"{theirs}.pre_ff_layernorm.weight"]
        if i == 3:
            found |= {f"{ours}.mixer.{k}.weight": state[f"{theirs}.self_attn.{k}_proj.weight"] for k in "qkvo"}
        else:
            found |= of_mixer(state, f"{theirs}.mamba", f"{ours}.mixer", config)
            for mine, their in (("low", "dt"), ("b", "b"), ("c", "c")):
                found[f"{ours}.mixer.{mine}_norm.scale"] = state[f"{theirs}.mamba.{their}_layernorm.weight"]
        if f"{theirs}.feed_forward.router.weight" in state:
            gate, up = state[f"{theirs}.feed_forward.experts.gate_up_proj"].chunk(2, 1)
            found[f"{ours}.ffn.router.out.weight"] = state[f"{theirs}.feed_forward.router.weight"]
            found |= {f"{ours}.ffn.bank.gate.weight": gate, f"{ours}.ffn.bank.up.weight": up}
            found[f"{ours}.ffn.bank.down.weight"] = state[f"{theirs}.feed_forward.experts.down_proj"]
        else:
            for name in ("gate", "up", "down"):
                found[f"{ours}.ffn.{name}.weight"] = state[f"{theirs}.feed_forward.{name}_proj.weight"]
    return found


MODELS: dict[str, tuple[Any, Any, dict[str, Any], Any, Any]] = {
    "mamba": (hf.MambaConfig, hf.MambaForCausalLM, MAMBA, mamba_spec, of_stack(of_mixer)),
    "mamba with biases": (
        hf.MambaConfig,
        hf.MambaForCausalLM,
        {**MAMBA, "use_bias": True, "use_conv_bias": False, "conv_kernel": 3},
        mamba_spec,
        of_stack(of_mixer),
    ),
    "mamba2": (hf.Mamba2Config, hf.Mamba2ForCausalLM, {**MAMBA2, "n_groups": 1}, mamba2_spec, of_stack(of_mixer2)),
    "mamba2 in groups": (
        hf.Mamba2Config,
        hf.Mamba2ForCausalLM,
        {**MAMBA2, "n_groups": 2, "use_conv_bias": False, "layer_norm_epsilon": 1e-2},
        mamba2_spec,
        of_stack(of_mixer2),
    ),
    "jamba": (hf.JambaConfig, hf.JambaForCausalLM, {**JAMBA, "num_experts": 1}, jamba_spec, of_jamba),
    "jamba with experts": (hf.JambaConfig, hf.JambaForCausalLM, {**JAMBA, "num_experts": 4}, jamba_spec, of_jamba),
}


class Both:
    """Theirs and ours with equal weights, far from any initialization."""

    def __init__(self, name: str) -> None:
        config, model, fields, spec, self.names = MODELS[name]
        torch.manual_seed(0)  # some of their initial values are random
        self.config = config(**fields)
        self.theirs = model(self.config).eval()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for key, tensor in self.theirs.named_parameters():
                drawn = torch.randn(tensor.shape, generator=generator)
                moves = key.endswith(("A_log", "bias")) or tensor.dim() == 1
                tensor.copy_(tensor + 0.3 * drawn if moves else 0.3 * drawn)
        self.spec = spec(self.config)
        self.ours = build(self.spec)
        with torch.no_grad():
            given = self.names(dict(self.theirs.named_parameters()), self.config)
            assert given.keys() == {name for name, _ in self.ours.named_parameters()}
            for path, tensor in given.items():
                tensor_at(self.ours, path).copy_(tensor)
        self.tokens = torch.randint(0, 62, (2, N), generator=generator)


@pytest.fixture(params=MODELS, scope="module")
def both(request: pytest.FixtureRequest) -> Both:
    return Both(request.param)


def test_logits_and_gradients(both: Both) -> None:
    weight = torch.randn(2, N, 62, generator=torch.Generator().manual_seed(1))
    want = both.theirs(input_ids=both.tokens).logits
    got = both.ours(both.tokens, Ctx(layout=TokenLayout.whole(2, N)))
    assert apart(got, want) < 1e-5
    (want * weight).sum().backward()
    (got * weight).sum().backward()
    grads = {name: p.grad for name, p in both.theirs.named_parameters()}
    for path, grad in both.names(grads, both.config).items():
        mine = tensor_at(both.ours, path).grad
        assert mine is not None, path
        assert apart(mine, grad) < 2e-4, path


@torch.no_grad()
def test_greedy_tokens(both: Both) -> None:
    new, given = 12, both.tokens[:, :6]
    both.theirs.generation_config.eos_token_id = None
    how = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    made = both.theirs.generate(given, attention_mask=torch.ones_like(given), **how)
    pool = Pool(both.spec, rows=2, capacity=6 + new)
    step, chosen = pool.step([0, 1], [6, 6]), given
    ours: list[Tensor] = []
    for _ in range(new):
        chosen = both.ours(chosen, Ctx(layout=step.layout, views=step.views))[:, -1].argmax(-1)[:, None]
        ours.append(chosen)
        step = pool.step([0, 1], [1, 1])
    assert torch.cat(ours, 1).equal(made[:, 6:])
