"""ViT: a pre-LayerNorm encoder of image patches after a class token (Dosovitskiy et al. 2020)."""

from __future__ import annotations

from dovetail.hf.classes import Classes, classified
from dovetail.hf.field import ACTIVATIONS, Choice, Copy, Implied
from dovetail.hf.image import ATTENTION, EMBEDDINGS, Image
from dovetail.hf.table import HOUSEKEEPING, LAYERNORM, Dialect, Form, Skip, rows

NORM = {"kind": "layernorm", "eps": 1e-12}
MIXER = {"kind": "attention", "mask": "full", "position": "none", "bias": True, "out_bias": True}
LAYER = {"norm": NORM, "wire": "pre_norm", "mixer": MIXER, "ffn": {"kind": "mlp", "act": "gelu"}}


VIT = Dialect(
    name="vit",
    forms=(
        Form(
            architecture="ViTModel",
            auto="AutoModel",
            answer="pooler_output",
            head={"head": {"kind": "pooled_embedding", "pooling": "first", "dense": True}},
            tensors=rows("pooler.dense", "head.out"),
        ),
        classified("ViT", "Image", "vit.", "classifier", rows("classifier", "head.out"), (Classes(),)),
    ),
    spec={
        "embed": "patches",
        "position": {"kind": "learned", "length": 197},
        "layers": [LAYER],
        "norm": NORM,
        "init": {"kind": "normal", "residual": False},
    },
    required=("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    defaults={"image_size": 224, "patch_size": 16, "num_channels": 3},
    fields=(
        Copy("hidden_size", "width"),
        Image(),
        Copy("intermediate_size", "layers.*.ffn.hidden"),
        Copy("num_attention_heads", "layers.*.mixer.heads"),
        Copy("qkv_bias", "layers.*.mixer.bias"),
        Copy("layer_norm_eps", "norm.eps", "layers.*.norm.eps"),
        Copy("hidden_dropout_prob", "dropout", "layers.*.wire.dropout"),
        Copy("attention_probs_dropout_prob", "layers.*.mixer.dropout"),
        Copy("initializer_range", "init.spread"),
        Choice("hidden_act", "layers.*.ffn.act", ACTIVATIONS),
        Implied("pooler_output_size", "width", by=lambda config: config.get("hidden_size")),
    ),
    fixed={"pooler_act": "tanh"},
    ignored=HOUSEKEEPING | {"encoder_stride"},
    tensors=(
        *EMBEDDINGS,
        *ATTENTION,
        *rows("encoder.layer.{}.layernorm_before", "layers.{}.mixer_norm", *LAYERNORM),
        *rows("encoder.layer.{}.layernorm_after", "layers.{}.ffn_norm", *LAYERNORM),
        *rows("encoder.layer.{}.intermediate.dense", "layers.{}.ffn.up"),
        *rows("encoder.layer.{}.output.dense", "layers.{}.ffn.down"),
        *rows("layernorm", "norm", *LAYERNORM),
    ),
    skips=tuple(Skip(f"{prefix}pooler.*", "a pooler that this model class does not use") for prefix in ("vit.", "")),
)
