"""GPT-NeoX and Pythia: attention and FFN in parallel with a norm each, RoPE on a quarter of each head (Black et al. 2022)."""

from __future__ import annotations

from dovetail.hf.field import ACTIVATIONS, SIZES, Choice, Copy, Switch
from dovetail.hf.rotary import ROTARY_FRACTION, Rotary
from dovetail.hf.table import HOUSEKEEPING, INV_FREQ, LAYERNORM, Dialect, Form, Row, Skip, rows

PARALLEL = {"kind": "parallel", "one_norm": False}
MIXER = {"kind": "attention", "packed": True, "bias": True, "out_bias": True, "position": {"kind": "rope", "fraction": 0.25}}

GPT_NEOX = Dialect(
    name="gpt_neox",
    forms=(Form(architecture="GPTNeoXForCausalLM", prefix="gpt_neox.", tensors=(Row("embed_out.weight", "head.out.weight"),)),),
    spec={
        "norm": "layernorm",
        "head": {"kind": "lm", "tied": False},
        "init": {"kind": "normal", "residual": False},
        "layers": [{"norm": "layernorm", "wire": PARALLEL, "mixer": MIXER, "ffn": {"kind": "mlp", "act": "gelu"}}],
    },
    fields=(
        *SIZES,
        Copy("layer_norm_eps", "norm.eps", "layers.*.norm.eps"),
        Switch("use_parallel_residual", "layers.*.wire", on=PARALLEL, off={"kind": "pre_norm"}),
        Copy("hidden_dropout", "layers.*.wire.dropout", "dropout"),
        Copy("attention_dropout", "layers.*.mixer.dropout"),
        Copy("attention_bias", "layers.*.mixer.bias", "layers.*.mixer.out_bias"),
        Copy("tie_word_embeddings", "head.tied"),
        Copy("initializer_range", "init.spread"),
        Choice("hidden_act", "layers.*.ffn.act", ACTIVATIONS),
        Rotary("layers.*.mixer.position", partial=True),
    ),
    aliases={"rotary_pct": ROTARY_FRACTION, "rotary_emb_base": "rope_theta"},
    fixed={"is_decoder": False},
    tensors=(
        Row("embed_in.weight", "embed.table"),
        *rows("layers.{}.input_layernorm", "layers.{}.mixer_norm", *LAYERNORM),
        *rows("layers.{}.post_attention_layernorm", "layers.{}.ffn_norm", *LAYERNORM),
        *rows("layers.{}.attention.query_key_value", "layers.{}.mixer.qkv"),
        *rows("layers.{}.attention.dense", "layers.{}.mixer.o"),
        *rows("layers.{}.mlp.dense_h_to_4h", "layers.{}.ffn.up"),
        *rows("layers.{}.mlp.dense_4h_to_h", "layers.{}.ffn.down"),
        *rows("final_layer_norm", "norm", *LAYERNORM),
    ),
    skips=(
        Skip("*.attention.bias", "the causal mask"),
        Skip("*.attention.masked_bias", "the score of masked keys"),
        INV_FREQ,
    ),
    ignored=HOUSEKEEPING | {"classifier_dropout"},
)
