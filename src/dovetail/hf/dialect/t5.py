"""T5 and T5 1.1: an encoder–decoder with relative biases, unscaled scores and RMSNorm (Raffel et al. 2020; Shazeer 2020)."""

from __future__ import annotations

from typing import Any

from dovetail.base.errors import SpecError
from dovetail.hf.convert import TRANSPOSE
from dovetail.hf.field import Config, Copy, Field, Settings, value_at
from dovetail.hf.gated import GatedActivation
from dovetail.hf.table import HOUSEKEEPING, Dialect, Form, Row, Skip
from dovetail.model.model import Model

NORM = {"kind": "rmsnorm", "eps": 1e-6}
WIRE = {"kind": "pre_norm", "dropout": 0.1}
FFN = {"kind": "mlp", "act": "relu", "bias": False, "dropout": 0.1}
SELF = {"kind": "attention", "scale": 1.0, "dropout": 0.1}
ENCODER_LAYER = {
    "wire": WIRE,
    "norm": NORM,
    "mixer": {**SELF, "mask": "full", "position": {"kind": "t5_bias", "bidirectional": True}},
    "ffn": FFN,
}
LAYER = {
    "wire": WIRE,
    "norm": NORM,
    "mixer": {**SELF, "position": "t5_bias"},
    "cross": {**SELF, "kind": "cross_attention"},
    "ffn": FFN,
}
STACKS = ("layers.*", "encoder.layers.*")
MIXERS = ("layers.*.mixer", "layers.*.cross", "encoder.layers.*.mixer")


def everywhere(places: tuple[str, ...], field: str) -> tuple[str, ...]:
    """The path of a field at each of the places."""
    return tuple(f"{place}.{field}" for place in places)


class OutputScale(Field):
    """The decoder's output is scaled by 1/√width in T5, not in T5 1.1."""

    names = ("scale_decoder_outputs",)

    def to_hf(self, spec: Model) -> dict[str, Any]:
        scales = {spec.width**-0.5: True, 1.0: False}
        scale = value_at(spec, "head.scale")
        return {"scale_decoder_outputs": scales[scale]} if scale in scales else {}

    def from_hf(self, config: Config) -> Settings:
        width, scaled = config.get("d_model"), config.get("scale_decoder_outputs")
        if scaled is None:
            scaled = config.get("tie_word_embeddings") is not False
        if not isinstance(width, int) or width < 1 or not isinstance(scaled, bool):
            raise SpecError("config.scale_decoder_outputs", f"{scaled!r} is not true or false for a width of {width!r}")
        return {"head.scale": width**-0.5 if scaled else 1.0}


def stack(theirs: str, ours: str, ffn: int) -> tuple[Row, ...]:
    """Rows of one stack: attention, and the FFN, which is sublayer `ffn`."""
    dense = f"{theirs}.block.{{}}.layer.{ffn}.DenseReluDense"
    table = "layer.0.SelfAttention.relative_attention_bias.weight"
    return (
        Row(f"{theirs}.block.0.{table}", f"{ours}layers.0.mixer.position.table", convert=TRANSPOSE),
        Row(f"{theirs}.block.{{}}.layer.0.layer_norm.weight", f"{ours}layers.{{}}.mixer_norm.scale"),
        *attention(f"{theirs}.block.{{}}.layer.0.SelfAttention", f"{ours}layers.{{}}.mixer"),
        Row(f"{theirs}.block.{{}}.layer.{ffn}.layer_norm.weight", f"{ours}layers.{{}}.ffn_norm.scale"),
        Row(f"{dense}.wi.weight", f"{ours}layers.{{}}.ffn.up.weight", where=f"{ours}layers.{{}}.ffn:mlp"),
        Row(f"{dense}.wi_0.weight", f"{ours}layers.{{}}.ffn.gate.weight"),
        Row(f"{dense}.wi_1.weight", f"{ours}layers.{{}}.ffn.up.weight", where=f"{ours}layers.{{}}.ffn:glu"),
        Row(f"{dense}.wo.weight", f"{ours}layers.{{}}.ffn.down.weight"),
        Row(f"{theirs}.final_layer_norm.weight", f"{ours}norm.scale"),
    )


def attention(theirs: str, ours: str) -> tuple[Row, ...]:
    """Rows of q, k, v and o."""
    return tuple(Row(f"{theirs}.{name}.weight", f"{ours}.{name}.weight") for name in "qkvo")


T5 = Dialect(
    name="t5",
    forms=(
        Form(
            architecture="T5ForConditionalGeneration",
            auto="AutoModelForSeq2SeqLM",
            tensors=(Row("lm_head.weight", "head.out.weight"),),
            fields=(Copy("tie_word_embeddings", "head.tied"), OutputScale()),
        ),
        Form(architecture="T5Model", auto="AutoModel", answer="last_hidden_state", head={"head": None}),
    ),
    spec={
        "dropout": 0.1,
        "encoder": {
            "embed": {"kind": "tokens", "shared": True},
            "dropout": 0.1,
            "layers": [ENCODER_LAYER],
            "norm": NORM,
            "head": None,
        },
        "layers": [LAYER],
        "norm": NORM,
        "head": "lm",
    },
    layers="num_decoder_layers",
    encoder="num_layers",
    defaults={"dropout_rate": 0.1},
    fallbacks={"num_decoder_layers": "num_layers"},
    required=("vocab_size", "d_model", "d_kv", "d_ff", "num_layers", "num_heads"),
    fields=(
        Copy("vocab_size", "vocab", "encoder.vocab"),
        Copy("d_model", "width", "encoder.width"),
        GatedActivation(*everywhere(STACKS, "ffn")),
        Copy("d_ff", *everywhere(STACKS, "ffn.hidden")),
        Copy("num_heads", *everywhere(MIXERS, "heads")),
        Copy("d_kv", *everywhere(MIXERS, "head")),
        Copy("relative_attention_num_buckets", *everywhere(STACKS, "mixer.position.buckets")),
        Copy("relative_attention_max_distance", *everywhere(STACKS, "mixer.position.max_distance")),
        Copy("layer_norm_epsilon", "norm.eps", "encoder.norm.eps", *everywhere(STACKS, "norm.eps")),
        Copy("dropout_rate", "dropout", "encoder.dropout", *everywhere(MIXERS, "dropout"), *everywhere(STACKS, "wire.dropout")),
        Copy("dropout_rate", *everywhere(STACKS, "ffn.dropout")),
    ),
    ignored=HOUSEKEEPING
    | {"classifier_dropout", "initializer_factor", "n_positions", "tie_word_embeddings", "scale_decoder_outputs"},
    fixed={"is_decoder": False},
    tensors=(
        Row("shared.weight", "embed.table"),
        Row("encoder.embed_tokens.weight", "encoder.embed.table"),
        *stack("encoder", "encoder.", 1),
        *stack("decoder", "", 2),
        Row("decoder.block.{}.layer.1.layer_norm.weight", "layers.{}.cross_norm.scale"),
        *attention("decoder.block.{}.layer.1.EncDecAttention", "layers.{}.cross"),
    ),
    copies={"decoder.embed_tokens.weight": "embed.table"},
    skips=(
        Skip(
            "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
            "a relative bias of cross-attention, which T5 does not use",
        ),
    ),
)
