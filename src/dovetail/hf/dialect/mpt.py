"""MPT: ALiBi, no biases, LayerNorms without a shift, q, k and v packed (MosaicML 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.base.errors import SpecError
from dovetail.hf.convert import CONCAT
from dovetail.hf.field import Config, Copy, Field, Settings, value_at
from dovetail.hf.table import HOUSEKEEPING, Dialect, Form, Row
from dovetail.model.model import Model

NORM = {"kind": "layernorm", "shift": False}
ONLY = {
    "alibi": True,
    "alibi_bias_max": 8,
    "attn_type": "multihead_attention",
    "clip_qkv": None,
    "prefix_lm": False,
    "qk_ln": False,
}
SILENT = HOUSEKEEPING | {"attn_impl", "attn_uses_sequence_id", "is_encoder_decoder", "softmax_scale", "attn_pdrop"}


class AttnConfig(Field):
    """The config of attention inside the config."""

    names = ("attn_config",)

    def to_hf(self, spec: Model) -> dict[str, Any]:
        scale, dropout = value_at(spec, "layers.*.mixer.scale"), value_at(spec, "layers.*.mixer.dropout")
        return {"attn_config": {**ONLY, "softmax_scale": scale, "attn_pdrop": dropout or 0}}  # a whole 0 there

    def from_hf(self, config: Config) -> Settings:
        said = config.get("attn_config") or {}
        if not isinstance(said, Mapping):
            raise SpecError("config.attn_config", f"{said!r} is not a mapping")
        for name, value in said.items():
            if name in ONLY and value != ONLY[name]:
                raise SpecError(f"config.attn_config.{name}", f"{value!r} is unsupported", f"supported: {ONLY[name]!r}")
            if name not in ONLY and name not in SILENT:
                raise SpecError(f"config.attn_config.{name}", "is not a known field of mpt")
        found = {"layers.*.mixer.scale": said.get("softmax_scale"), "layers.*.mixer.dropout": said.get("attn_pdrop")}
        return {path: value for path, value in found.items() if value is not None}


MPT = Dialect(
    name="mpt",
    forms=(Form(architecture="MptForCausalLM", prefix="transformer.", tensors=(Row("lm_head.weight", "head.out.weight"),)),),
    spec={
        "norm": NORM,
        "head": "lm",
        "init": {"kind": "normal", "residual": False},
        "layers": [
            {
                "norm": NORM,
                "wire": "pre_norm",
                "mixer": {"kind": "attention", "position": "alibi"},
                "ffn": {"kind": "mlp", "act": "gelu", "bias": False},
            }
        ],
    },
    layers="n_layers",
    required=("vocab_size", "d_model", "n_layers", "n_heads"),
    fields=(
        Copy("vocab_size", "vocab"),
        Copy("d_model", "width"),
        Copy("n_heads", "layers.*.mixer.heads"),
        Copy("layer_norm_epsilon", "norm.eps", "layers.*.norm.eps"),
        Copy("resid_pdrop", "layers.*.wire.dropout"),
        Copy("emb_pdrop", "dropout"),
        Copy("initializer_range", "init.spread"),
        Copy("tie_word_embeddings", "head.tied"),
        AttnConfig(),
    ),
    fixed={"expansion_ratio": 4, "no_bias": True, "learned_pos_emb": True, "logit_scale": None, "embedding_fraction": 1.0},
    tensors=(
        Row("wte.weight", "embed.table"),
        Row("blocks.{}.norm_1.weight", "layers.{}.mixer_norm.scale"),
        Row("blocks.{}.attn.Wqkv.weight", *(f"layers.{{}}.mixer.{name}.weight" for name in "qkv"), convert=CONCAT),
        Row("blocks.{}.attn.out_proj.weight", "layers.{}.mixer.o.weight"),
        Row("blocks.{}.norm_2.weight", "layers.{}.ffn_norm.scale"),
        Row("blocks.{}.ffn.up_proj.weight", "layers.{}.ffn.up.weight"),
        Row("blocks.{}.ffn.down_proj.weight", "layers.{}.ffn.down.weight"),
        Row("norm_f.weight", "norm.scale"),
    ),
    ignored=HOUSEKEEPING | {"init_device", "max_seq_len", "norm_type", "verbose", "init_config", "use_norm_bias"},
)
