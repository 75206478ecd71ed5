"""gpt-oss: sliding windows in every second layer, learned sinks, experts with clamped gates and biases (OpenAI 2025).

Matrices of experts are transposed, gate and up interleaved row by row; published files hold them in mxfp4
(hf/quantized.py).
"""

from __future__ import annotations

from dovetail.hf.convert import INTERLEAVE_ROWS, TRANSPOSE
from dovetail.hf.dialect.gemma2 import default
from dovetail.hf.dialect.llama import LLAMA
from dovetail.hf.expert import BalanceLoss
from dovetail.hf.field import Config, Copy, Implied, Settings
from dovetail.hf.layer import LayerTypes
from dovetail.hf.rotary import Rotary
from dovetail.hf.table import Row

FFN, ROUTER, LAYER = "layers.*.ffn", "layers.*.ffn.router", "layers.{}"
YARN = {"factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 4096}


class YarnRotary(Rotary):
    """RoPE with YaRN where the config has no parameters."""

    def from_hf(self, config: Config) -> Settings:
        left_out = config.get("rope_parameters") is None and config.get("rope_scaling") is None
        return super().from_hf({**config, "rope_parameters": {"rope_type": "yarn", **YARN}} if left_out else config)


GPT_OSS = LLAMA.variant(
    "gpt_oss",
    architecture="GptOssForCausalLM",
    layer={
        "mixer": {"bias": True, "out_bias": True, "sink": True},
        "ffn": {
            "kind": "moe",
            "act": "quick_gelu",
            "bias": True,
            "limit": 7.0,
            "plus_one": True,
            "router": {"kind": "softmax_router", "bias": True},
        },
    },
    without=("mlp_bias", "pretraining_tp"),
    fields=(
        LayerTypes("num_hidden_layers", default),
        Copy("num_local_experts", f"{FFN}.experts"),
        Copy("num_experts_per_tok", f"{ROUTER}.top_k"),
        Implied("experts_per_token", f"{ROUTER}.top_k", by=lambda config: config.get("num_experts_per_tok")),
        YarnRotary("layers.*.mixer.position"),
        Copy("swiglu_limit", f"{FFN}.limit"),
        BalanceLoss(f"{ROUTER}.balance_loss", "num_local_experts"),
    ),
    tensors=(
        Row(f"{LAYER}.self_attn.sinks", f"{LAYER}.mixer.sink"),
        Row(f"{LAYER}.mlp.router.weight", f"{LAYER}.ffn.router.out.weight"),
        Row(f"{LAYER}.mlp.router.bias", f"{LAYER}.ffn.router.out.bias"),
        Row(
            f"{LAYER}.mlp.experts.gate_up_proj",
            f"{LAYER}.ffn.bank.gate.weight",
            f"{LAYER}.ffn.bank.up.weight",
            convert=INTERLEAVE_ROWS.then(TRANSPOSE),
        ),
        Row(
            f"{LAYER}.mlp.experts.gate_up_proj_bias",
            f"{LAYER}.ffn.bank.gate.bias",
            f"{LAYER}.ffn.bank.up.bias",
            convert=INTERLEAVE_ROWS,
        ),
        Row(f"{LAYER}.mlp.experts.down_proj", f"{LAYER}.ffn.bank.down.weight", convert=TRANSPOSE),
        Row(f"{LAYER}.mlp.experts.down_proj_bias", f"{LAYER}.ffn.bank.down.bias"),
    ),
    fixed={"swiglu_alpha": 1.702, "hidden_act": "silu"},
    ignored=("initial_context_length",),  # the rope carries it
    defaults={
        "rope_theta": 150000.0,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "rms_norm_eps": 1e-5,
        "router_aux_loss_coef": 0.001,
    },
    limits=(),
)
