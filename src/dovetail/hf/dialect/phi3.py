"""Phi 3: Llama with packed q, k, v and packed gate, up; RoPE on a fraction of each head (Abdin et al. 2024)."""

from __future__ import annotations

from dovetail.hf.convert import CONCAT
from dovetail.hf.dialect.llama import LLAMA, MLP
from dovetail.hf.field import Copy
from dovetail.hf.layer import Window
from dovetail.hf.rotary import Rotary
from dovetail.hf.table import Row

PHI3 = LLAMA.variant(
    "phi3",
    architecture="Phi3ForCausalLM",
    without=(
        *("attention_bias", "mlp_bias", "pretraining_tp", "head_dim"),
        *(f"layers.{{}}.self_attn.{name}_proj.{leaf}" for name in "qkvo" for leaf in ("weight", "bias")),
        *MLP,
    ),
    fields=(
        Window(),
        Rotary("layers.*.mixer.position", partial=True),
        Copy("resid_pdrop", "layers.*.wire.dropout"),
        Copy("embd_pdrop", "dropout"),
    ),
    tensors=(
        Row("layers.{}.self_attn.qkv_proj.weight", *(f"layers.{{}}.mixer.{name}.weight" for name in "qkv"), convert=CONCAT),
        Row("layers.{}.self_attn.o_proj.weight", "layers.{}.mixer.o.weight"),
        Row("layers.{}.mlp.gate_up_proj.weight", "layers.{}.ffn.gate.weight", "layers.{}.ffn.up.weight", convert=CONCAT),
        Row("layers.{}.mlp.down_proj.weight", "layers.{}.ffn.down.weight"),
    ),
    ignored=("original_max_position_embeddings",),  # the rope carries it
    defaults={"rms_norm_eps": 1e-5},
    limits=(),
)
