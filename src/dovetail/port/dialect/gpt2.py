"""GPT-2: pre-LayerNorm, GELU, learned positions, full heads with biases; matrices lie on their side (Radford et al. 2019)."""

from __future__ import annotations

from dovetail.port.convert import STACK, TRANSPOSE
from dovetail.port.table import ACTIVATIONS, HOUSEKEEPING, Dialect, Named, Row, Same, Switch

MIXER = {"kind": "attention", "position": "none", "bias": True, "out_bias": True, "dropout": 0.1}
LAYER = {
    "norm": "layernorm",
    "wire": {"kind": "pre", "dropout": 0.1},
    "mixer": MIXER,
    "ffn": {"kind": "mlp", "act": "gelu_tanh"},
}
QKV = ("layers.{}.mixer.q", "layers.{}.mixer.k", "layers.{}.mixer.v")

GPT2 = Dialect(
    name="gpt2",
    architecture="GPT2LMHeadModel",
    spec={
        "position": "learned",
        "dropout": 0.1,
        "norm": "layernorm",
        "head": "lm",
        "layers": [LAYER],
    },
    layers="n_layer",
    required=("vocab_size", "n_embd", "n_layer", "n_head"),
    fields=(
        Same("vocab_size", "vocab"),
        Same("n_embd", "width"),
        Same("n_positions", "position.length"),
        Same("n_head", "layers.*.mixer.heads"),
        Same("n_inner", "layers.*.ffn.hidden"),
        Same("layer_norm_epsilon", "norm.eps", "layers.*.norm.eps"),
        Same("resid_pdrop", "layers.*.wire.dropout"),
        Same("attn_pdrop", "layers.*.mixer.dropout"),
        Same("embd_pdrop", "dropout"),
        Same("tie_word_embeddings", "head.tied"),
        Same("initializer_range", "init.spread"),
        Switch("scale_attn_weights", "layers.*.mixer.scale", on=None, off=1.0),
        Named("activation_function", "layers.*.ffn.act", {"gelu_new": "gelu_tanh", **ACTIVATIONS}),
    ),
    fixed={
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
        "add_cross_attention": False,
        "is_encoder_decoder": False,
    },
    ignored=HOUSEKEEPING
    | {
        "n_ctx",  # n_positions under an older name
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
    },
    tensors=(
        Row("transformer.wte.weight", "embed.table"),
        Row("transformer.wpe.weight", "position.table"),
        Row("transformer.h.{}.ln_1.weight", "layers.{}.mixer_norm.scale"),
        Row("transformer.h.{}.ln_1.bias", "layers.{}.mixer_norm.shift"),
        Row("transformer.h.{}.attn.c_attn.weight", *(f"{name}.weight" for name in QKV), convert=STACK.then(TRANSPOSE)),
        Row("transformer.h.{}.attn.c_attn.bias", *(f"{name}.bias" for name in QKV), convert=STACK),
        Row("transformer.h.{}.attn.c_proj.weight", "layers.{}.mixer.o.weight", convert=TRANSPOSE),
        Row("transformer.h.{}.attn.c_proj.bias", "layers.{}.mixer.o.bias"),
        Row("transformer.h.{}.ln_2.weight", "layers.{}.ffn_norm.scale"),
        Row("transformer.h.{}.ln_2.bias", "layers.{}.ffn_norm.shift"),
        Row("transformer.h.{}.mlp.c_fc.weight", "layers.{}.ffn.up.weight", convert=TRANSPOSE),
        Row("transformer.h.{}.mlp.c_fc.bias", "layers.{}.ffn.up.bias"),
        Row("transformer.h.{}.mlp.c_proj.weight", "layers.{}.ffn.down.weight", convert=TRANSPOSE),
        Row("transformer.h.{}.mlp.c_proj.bias", "layers.{}.ffn.down.bias"),
        Row("transformer.ln_f.weight", "norm.scale"),
        Row("transformer.ln_f.bias", "norm.shift"),
        Row("lm_head.weight", "head.table"),
    ),
    stale=("*.attn.bias", "*.attn.masked_bias"),
)
