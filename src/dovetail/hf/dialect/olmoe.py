"""OLMoE: Llama with norms on all of q and k, and many small experts (Muennighoff et al. 2024)."""

from __future__ import annotations

from dovetail.hf.dialect.llama import LLAMA, MLP, NORM
from dovetail.hf.expert import BalanceLoss, expert_rows
from dovetail.hf.field import Copy
from dovetail.hf.table import Row

OLMOE = LLAMA.variant(
    "olmoe",
    architecture="OlmoeForCausalLM",
    layer={
        "mixer": {"qk_norm": NORM, "qk_norm_whole": True},
        "ffn": {"kind": "moe", "router": {"kind": "softmax_router", "normalize": False}},
    },
    without=("head_dim", "mlp_bias", "pretraining_tp", *MLP),
    fields=(
        Copy("rms_norm_eps", "norm.eps", "layers.*.norm.eps", "layers.*.mixer.qk_norm.eps"),
        Copy("num_experts", "layers.*.ffn.experts"),
        Copy("num_experts_per_tok", "layers.*.ffn.router.top_k"),
        Copy("norm_topk_prob", "layers.*.ffn.router.normalize"),
        BalanceLoss("layers.*.ffn.router.balance_loss", "num_experts"),
    ),
    tensors=(
        Row("layers.{}.self_attn.q_norm.weight", "layers.{}.mixer.q_norm.scale"),
        Row("layers.{}.self_attn.k_norm.weight", "layers.{}.mixer.k_norm.scale"),
        Row("layers.{}.mlp.gate.weight", "layers.{}.ffn.router.out.weight"),
        *expert_rows("layers.{}.mlp.experts.{expert}", "layers.{}.ffn.bank"),
    ),
    aliases={"num_local_experts": "num_experts"},
    fixed={"clip_qkv": None},  # limits the values of q, k and v
    defaults={"rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8, "router_aux_loss_coef": 0.01},
    limits=(),
)
