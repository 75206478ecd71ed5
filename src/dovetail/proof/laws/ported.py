"""Law 13, ported: export to Hugging Face and import are bit-equal, and the logits of transformers agree with ours, wherever
Hugging Face can express the spec.

transformers is imported only here and in tests, and only where it is installed.
"""

from __future__ import annotations

import functools
import importlib.util
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from dovetail.base.errors import SpecError
from dovetail.disk.yaml import parse_yaml
from dovetail.files.spec import from_yaml
from dovetail.hf.dialect import DIALECTS
from dovetail.hf.field import value_at
from dovetail.hf.hf import Ported, export_tensors, from_hf, import_tensors, to_hf
from dovetail.model.construction import build, generator
from dovetail.model.model import Model
from dovetail.nn.module import tensor_at
from dovetail.proof.laws.case import DTYPE, Case, NotApplicable, law
from dovetail.spec.fold import declared

# transformers computes rotary angles and norms in float32 in any dtype, so its float64 outputs have float32 errors; they are
# largest for T5, whose scores are not scaled
REFERENCE = 1e-5
FILE = "model.safetensors"


ROPES = (
    "rope",
    {"kind": "rope", "base": 100.0, "scaling": {"kind": "linear_scaling", "factor": 2.0}},
    {"kind": "rope", "scaling": {"kind": "llama3", "original": 16, "factor": 4.0}},
    {"kind": "rope", "scaling": {"kind": "yarn", "original": 16, "factor": 4.0}},
)
LLAMA = """
width: 30
vocab: 62
layers: [{repeat: 2, mixer: {heads: 6, kv_heads: 2, head: 12}, ffn: {hidden: 44}}]
"""
GPT2 = """
width: 30
vocab: 62
position: {kind: learned, length: 64}
layers:
- repeat: 2
  norm: layernorm
  mixer: {heads: 6, position: none, bias: true, out_bias: true}
  ffn: {kind: mlp, act: gelu_tanh}
norm: layernorm
"""
# configs of families that are not variants of Llama; each is tested with all its heads
OTHERS = """
bert: {vocab_size: 62, hidden_size: 30, intermediate_size: 44, num_hidden_layers: 2, num_attention_heads: 5,
  max_position_embeddings: 64, type_vocab_size: 3}
roberta: {vocab_size: 62, hidden_size: 30, intermediate_size: 44, num_hidden_layers: 2, num_attention_heads: 5,
  max_position_embeddings: 66, pad_token_id: 1}
distilbert: {vocab_size: 62, dim: 30, hidden_dim: 44, n_layers: 2, n_heads: 5, max_position_embeddings: 64}
modernbert: {vocab_size: 62, hidden_size: 30, intermediate_size: 44, num_hidden_layers: 3, num_attention_heads: 5,
  local_attention: 8, classifier_bias: true}
vit: {hidden_size: 30, intermediate_size: 44, num_hidden_layers: 2, num_attention_heads: 5, image_size: 18, patch_size: 6,
  num_channels: 2}
dinov2: {hidden_size: 30, num_hidden_layers: 2, num_attention_heads: 5, image_size: 18, patch_size: 6, use_swiglu_ffn: true}
t5: {vocab_size: 62, d_model: 30, d_kv: 12, d_ff: 44, num_heads: 5, num_layers: 3, num_decoder_layers: 2,
  relative_attention_num_buckets: 8, relative_attention_max_distance: 16, feed_forward_proj: gated-gelu}
bart: {vocab_size: 62, d_model: 30, encoder_layers: 3, decoder_layers: 2, encoder_attention_heads: 3,
  decoder_attention_heads: 5, encoder_ffn_dim: 37, decoder_ffn_dim: 44, max_position_embeddings: 64}
mixtral: {vocab_size: 62, hidden_size: 30, intermediate_size: 44, num_hidden_layers: 2, num_attention_heads: 6,
  num_key_value_heads: 2, head_dim: 12, num_local_experts: 4}
qwen3_moe: {vocab_size: 62, hidden_size: 30, intermediate_size: 44, moe_intermediate_size: 20, num_hidden_layers: 2,
  num_attention_heads: 6, num_key_value_heads: 2, head_dim: 12, num_experts: 6, num_experts_per_tok: 2, mlp_only_layers: [0]}
deepseek_v3: {vocab_size: 62, hidden_size: 30, intermediate_size: 44, moe_intermediate_size: 20, num_hidden_layers: 2,
  num_attention_heads: 6, num_key_value_heads: 6, kv_lora_rank: 10, q_lora_rank: 14, qk_nope_head_dim: 9, qk_rope_head_dim: 12,
  v_head_dim: 7, n_routed_experts: 8, n_group: 4, topk_group: 2, num_experts_per_tok: 2, first_k_dense_replace: 1,
  rope_parameters: {rope_type: yarn, rope_theta: 100.0, factor: 4.0, original_max_position_embeddings: 200, beta_fast: 8.0,
    beta_slow: 1.0, mscale: 0.7, mscale_all_dim: 1.3}}
gpt_oss: {vocab_size: 62, hidden_size: 30, intermediate_size: 20, num_hidden_layers: 2, num_attention_heads: 6,
  num_key_value_heads: 2, head_dim: 12, num_local_experts: 4, num_experts_per_tok: 2, sliding_window: 5, swiglu_limit: 0.8}
mamba: {vocab_size: 62, hidden_size: 30, num_hidden_layers: 2, state_size: 5, time_step_rank: 7, use_bias: true}
mamba2: {vocab_size: 62, hidden_size: 30, num_hidden_layers: 2, state_size: 5, head_dim: 6, num_heads: 10, n_groups: 2}
qwen3_next: {vocab_size: 62, hidden_size: 30, intermediate_size: 44, moe_intermediate_size: 20, num_hidden_layers: 2,
  shared_expert_intermediate_size: 22, num_attention_heads: 6, num_key_value_heads: 2, head_dim: 12, num_experts: 6,
  num_experts_per_tok: 2, linear_num_value_heads: 4, linear_num_key_heads: 2, linear_key_head_dim: 5,
  linear_value_head_dim: 6, layer_types: [linear_attention, full_attention], partial_rotary_factor: 0.5}
jamba: {vocab_size: 62, hidden_size: 30, intermediate_size: 44, num_hidden_layers: 2, num_attention_heads: 6,
  num_key_value_heads: 2, num_experts: 4, attn_layer_period: 2, attn_layer_offset: 1, expert_layer_period: 2,
  expert_layer_offset: 1, mamba_d_state: 5, mamba_dt_rank: 7}
nemotron_h: {vocab_size: 62, hidden_size: 30, intermediate_size: 44, moe_intermediate_size: 20, num_attention_heads: 6,
  num_key_value_heads: 2, head_dim: 12, mamba_num_heads: 6, mamba_head_dim: 7, n_groups: 2, ssm_state_size: 5,
  n_routed_experts: 8, n_group: 4, topk_group: 2, moe_shared_expert_intermediate_size: 22, moe_latent_size: 16,
  layers_block_type: [linear_attention, moe, full_attention, mlp]}
falcon_h1: {vocab_size: 62, hidden_size: 30, intermediate_size: 44, num_hidden_layers: 2, num_attention_heads: 6,
  num_key_value_heads: 2, head_dim: 12, mamba_d_ssm: 42, mamba_n_heads: 6, mamba_n_groups: 2, mamba_d_state: 5,
  mamba_rms_norm: true, mamba_norm_before_gate: true, lm_head_multiplier: 0.4, embedding_multiplier: 3.0,
  key_multiplier: 0.7, attention_in_multiplier: 0.6, attention_out_multiplier: 1.3, ssm_in_multiplier: 1.5,
  ssm_out_multiplier: 0.7, ssm_multipliers: [0.5, 1.4, 0.7, 1.3, 0.9], mlp_multipliers: [0.7, 0.8]}
"""


def known_to_reference() -> list[Model]:
    """Small specs that Hugging Face can express; sampled specs are almost never among them."""
    llama, gpt2 = from_yaml(LLAMA), from_yaml(GPT2)
    llamas = [llama.set("layers.*.mixer.position", rope) for rope in ROPES]
    llamas += [llama.set("head.tied", False).set("layers.*.mixer.kv_heads", heads) for heads in (1, 3, None)]
    biased = llama.set("layers.*.mixer.bias", True).set("layers.*.mixer.out_bias", True)
    forms = [in_family(family, form.architecture) for family in _others() for form in DIALECTS[family].forms]
    return [*llamas, biased, *forms, gpt2, gpt2.set("layers.*.ffn.act", "relu"), gpt2.set("head.tied", False)]


@functools.cache
def _others() -> dict[str, dict[str, Any]]:
    return parse_yaml(OTHERS, "configs")


def in_family(family: str, architecture: str | None = None) -> Model:
    """A small spec of a family, with the head of this transformers class; by default the family's first."""
    architecture = architecture or DIALECTS[family].forms[0].architecture
    return from_hf({"model_type": family, "architectures": [architecture], **_others()[family]})


@law(13, "ported", "to Hugging Face and back is bit for bit, and the logits agree")
@torch.no_grad()
def ported(case: Case) -> None:
    """Export the weights, compare the tensors read back, and compare the outputs of transformers with ours."""
    try:
        ours = to_hf(case.spec, length=64)
    except SpecError as cannot:
        case.true(bool(cannot.path), f"the error names no part: {cannot}")
        raise NotApplicable(str(cannot)) from cannot
    if importlib.util.find_spec("transformers") is None:
        raise NotApplicable("transformers is not installed")
    stored = {d.path: tensor_at(case.model, d.path).detach() for d in declared(case.spec) if d.weight.stored}
    theirs = export_tensors(case.spec, stored, ours.dialect)
    back = import_tensors(case.spec, theirs, ours.dialect)
    for path, tensor in stored.items():
        case.same(back[path], tensor, f"{path} exported and imported", 0.0)
    case.true(
        build(from_hf(ours.config), device="meta").part.width == case.spec.width, "the config read back has another width"
    )
    inputs, source = unpadded(case.inputs, ours), None if case.source is None else unpadded(case.source, ours)
    arguments = {"pixel_values": inputs} if not case.tokens else {"input_ids": inputs}
    if source is not None:
        arguments = {"input_ids": source, "decoder_input_ids": inputs}
    types = token_types(case)
    if types is not None:
        arguments["token_type_ids"] = types
    got = case.run(inputs, source=source, types=types)
    case.same(got, reference_output(ours, theirs, arguments), "our output and that of transformers", REFERENCE)


def token_types(case: Case) -> Tensor | None:
    """(batch, n) random token types, where the embedding has a table of types."""
    count = value_at(case.spec, "embed.types")
    several = isinstance(count, int) and count > 0
    return torch.randint(0, count, case.inputs.shape, generator=generator(case.seed, "types")) if several else None


def unpadded(inputs: Tensor, ported: Ported) -> Tensor:
    """Inputs without the padding token, from which some classes of transformers derive positions."""
    pad = ported.config.get("pad_token_id")
    return inputs if pad is None else torch.where(inputs == pad, torch.full_like(inputs, pad + 1), inputs)


def reference_output(ported: Ported, tensors: dict[str, Tensor], arguments: dict[str, Tensor]) -> Tensor:
    """The output of the transformers model with these weights, in float64. The weights go through a file, because the module
    may store them in another layout than the checkpoint."""
    import transformers

    tokens = {f"{name}_token_id": None for name in ("bos", "eos", "pad")}  # the default ids may be outside a small vocabulary
    settings = {**tokens, **ported.config}
    settings.pop("model_type", None)
    auto = getattr(transformers, ported.form.auto)
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as place:
        transformers.AutoConfig.for_model(ported.dialect, **settings).save_pretrained(place)
        save_file({name: t.contiguous() for name, t in tensors.items()}, Path(place) / FILE, metadata={"format": "pt"})
        eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
        model, loading = auto.from_pretrained(place, dtype=DTYPE, output_loading_info=True, **eager)
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not loading[what], f"transformers reports {what}: {loading[what]}"
    return getattr(model.eval()(**arguments), ported.form.answer)
