"""GPT-2: pre-LayerNorm, GELU, learned positions, biases; transposed matrices (Radford et al. 2019)."""

from __future__ import annotations

from dovetail.hf.convert import CONCAT, TRANSPOSE
from dovetail.hf.field import ACTIVATIONS, Choice, Copy, Switch
from dovetail.hf.table import HOUSEKEEPING, LAYERNORM, Dialect, Form, Row, Skip, rows

MIXER = {"kind": "attention", "position": "none", "bias": True, "out_bias": True, "dropout": 0.1}
LAYER = {
    "norm": "layernorm",
    "wire": {"kind": "pre_norm", "dropout": 0.1},
    "mixer": MIXER,
    "ffn": {"kind": "mlp", "act": "gelu_tanh"},
}
# of a head over a whole text, which language models do not have
SUMMARY = {f"summary_{name}" for name in ("activation", "first_dropout", "proj_to_labels", "type", "use_proj")}
QKV = ("layers.{}.mixer.q", "layers.{}.mixer.k", "layers.{}.mixer.v")

FIELDS = (
    Copy("vocab_size", "vocab"),
    Copy("n_embd", "width"),
    Copy("n_head", "layers.*.mixer.heads"),
    Copy("n_inner", "layers.*.ffn.hidden"),
    Copy("layer_norm_epsilon", "norm.eps", "layers.*.norm.eps"),
    Copy("resid_pdrop", "layers.*.wire.dropout"),
    Copy("attn_pdrop", "layers.*.mixer.dropout"),
    Copy("embd_pdrop", "dropout"),
    Copy("tie_word_embeddings", "head.tied"),
    Copy("initializer_range", "init.spread"),
    Choice("activation_function", "layers.*.ffn.act", {"gelu_new": "gelu_tanh", **ACTIVATIONS}),
)

GPT2 = Dialect(
    name="gpt2",
    forms=(Form(architecture="GPT2LMHeadModel", prefix="transformer.", tensors=(Row("lm_head.weight", "head.out.weight"),)),),
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
        *FIELDS,
        Copy("n_positions", "position.length"),
        Switch("scale_attn_weights", "layers.*.mixer.scale", on=None, off=1.0),
    ),
    fixed={
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
        "add_cross_attention": False,
    },
    ignored=HOUSEKEEPING | {"n_ctx", *SUMMARY},  # n_positions under an older name
    tensors=(
        Row("wte.weight", "embed.table"),
        Row("wpe.weight", "position.table"),
        *rows("h.{}.ln_1", "layers.{}.mixer_norm", *LAYERNORM),
        Row("h.{}.attn.c_attn.weight", *(f"{name}.weight" for name in QKV), convert=CONCAT.then(TRANSPOSE)),
        Row("h.{}.attn.c_attn.bias", *(f"{name}.bias" for name in QKV), convert=CONCAT),
        *rows("h.{}.attn.c_proj", "layers.{}.mixer.o", convert=TRANSPOSE),
        *rows("h.{}.ln_2", "layers.{}.ffn_norm", *LAYERNORM),
        *rows("h.{}.mlp.c_fc", "layers.{}.ffn.up", convert=TRANSPOSE),
        *rows("h.{}.mlp.c_proj", "layers.{}.ffn.down", convert=TRANSPOSE),
        *rows("ln_f", "norm", *LAYERNORM),
    ),
    skips=(Skip("*.attn.bias", "the causal mask"), Skip("*.attn.masked_bias", "the score of masked keys")),
)
