"""Phi 1 and 2: attention and FFN in parallel after one norm, biases, RoPE on half of each head (Gunasekar et al. 2023)."""

from __future__ import annotations

from dovetail.hf.dialect.llama import LLAMA, MLP
from dovetail.hf.field import ACTIVATIONS, Choice, Copy, Switch
from dovetail.hf.rotary import Rotary
from dovetail.hf.table import LAYERNORM, Form, Row, rows

OUT = tuple(f"layers.{{}}.self_attn.o_proj.{leaf}" for leaf in ("weight", "bias"))
QK_NORM = "layers.*.mixer.qk_norm"

PHI = LLAMA.variant(
    "phi",
    forms=(
        Form(
            architecture="PhiForCausalLM",
            prefix="model.",
            tensors=(Row("lm_head.weight", "head.out.weight"), Row("lm_head.bias", "head.bias")),
        ),
    ),
    spec={"norm": "layernorm", "head": {"kind": "lm", "tied": False, "bias": True}},
    layer={
        "norm": "layernorm",
        "wire": "parallel",
        "mixer": {"bias": True, "out_bias": True, "position": {"kind": "rope", "fraction": 0.5}},
        "ffn": {"kind": "mlp", "act": "gelu_tanh"},
    },
    without=(
        *("attention_bias", "mlp_bias", "pretraining_tp", "head_dim", "rms_norm_eps", "norm.weight", *MLP, *OUT),
        "layers.{}.post_attention_layernorm.weight",
    ),
    fields=(
        Switch("qk_layernorm", QK_NORM, on={"kind": "layernorm"}, off=None),
        Copy("layer_norm_eps", "norm.eps", "layers.*.norm.eps", "layers.*.mixer.qk_norm:layernorm.eps"),
        Copy("resid_pdrop", "layers.*.wire.dropout"),
        Copy("embd_pdrop", "dropout"),
        Choice("hidden_act", "layers.*.ffn.act", {"gelu_new": "gelu_tanh", **ACTIVATIONS}),
        Rotary("layers.*.mixer.position", partial=True),
    ),
    tensors=(
        *rows("layers.{}.input_layernorm", "layers.{}.norm", *LAYERNORM),
        *rows("layers.{}.self_attn.dense", "layers.{}.mixer.o"),
        *rows("layers.{}.self_attn.q_layernorm", "layers.{}.mixer.q_norm", *LAYERNORM),
        *rows("layers.{}.self_attn.k_layernorm", "layers.{}.mixer.k_norm", *LAYERNORM),
        *rows("layers.{}.mlp.fc1", "layers.{}.ffn.up"),
        *rows("layers.{}.mlp.fc2", "layers.{}.ffn.down"),
        *rows("final_layernorm", "norm", *LAYERNORM),
    ),
    limits=(),
)
