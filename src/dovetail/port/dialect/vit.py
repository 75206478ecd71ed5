"""ViT: a pre-LayerNorm encoder of the squares of an image behind a class token (Dosovitskiy et al. 2020)."""

from __future__ import annotations

from typing import Any

from dovetail.core.errors import SpecError
from dovetail.model import Model
from dovetail.port.classes import Classes
from dovetail.port.convert import Convert, Patches, Unsqueezed
from dovetail.port.table import (
    ACTIVATIONS,
    HOUSEKEEPING,
    LAYERNORM,
    Config,
    Dialect,
    Follows,
    Form,
    Named,
    Row,
    Same,
    Settings,
    look,
    rows,
)

NORM = {"kind": "layernorm", "eps": 1e-12}
MIXER = {"kind": "attention", "mask": "everything", "position": "none", "bias": True, "out_bias": True}
LAYER = {"norm": NORM, "wire": "pre", "mixer": MIXER, "ffn": {"kind": "mlp", "act": "gelu"}}


class Image:
    """The sides of an image and of its squares: a place for each square and one for the class token."""

    names = ("image_size", "patch_size", "num_channels")

    def give(self, spec: Model) -> dict[str, Any]:
        said = (look(spec, f"embed:patches.{name}") for name in ("image", "patch", "channels"))
        return {name: value for name, value in zip(self.names, said, strict=True) if isinstance(value, int)}

    def take(self, config: Config) -> Settings:
        image, patch, channels = (config.get(name) for name in self.names)
        for name, value in zip(self.names, (image, patch, channels), strict=True):
            if type(value) is not int or value < 1:
                raise SpecError(f"config.{name}", f"{value!r} is not a whole number above 0", "only square images are read")
        places = (image // patch) ** 2 + 1  # type: ignore[operator]
        return {"embed.image": image, "embed.patch": patch, "embed.channels": channels, "position.length": places}


class Squares(Row):
    """Their convolution over the squares, of as many channels as the spec's images have."""

    def conversion(self, spec: Model, layer: int) -> Convert:
        return Patches(look(spec, "embed.channels"))


EMBEDDINGS = (
    Row("embeddings.cls_token", "embed.class_token", convert=Unsqueezed(0).then(Unsqueezed(0))),
    Squares("embeddings.patch_embeddings.projection.weight", "embed.project.weight"),
    Row("embeddings.patch_embeddings.projection.bias", "embed.project.bias"),
    Row("embeddings.position_embeddings", "position.table", convert=Unsqueezed(0)),
)
ATTENTION = (
    *rows("encoder.layer.{}.attention.attention.query", "layers.{}.mixer.q", "weight", "bias"),
    *rows("encoder.layer.{}.attention.attention.key", "layers.{}.mixer.k", "weight", "bias"),
    *rows("encoder.layer.{}.attention.attention.value", "layers.{}.mixer.v", "weight", "bias"),
    *rows("encoder.layer.{}.attention.output.dense", "layers.{}.mixer.o", "weight", "bias"),
)

VIT = Dialect(
    name="vit",
    forms=(
        Form(
            architecture="ViTModel",
            auto="AutoModel",
            answer="pooler_output",
            head={"head": {"kind": "pooled", "how": "first", "dense": True}},
            tensors=rows("pooler.dense", "head.out", "weight", "bias"),
        ),
        Form(
            architecture="ViTForImageClassification",
            auto="AutoModelForImageClassification",
            head={"head": "classifier"},
            prefix="vit.",
            tensors=rows("classifier", "head.out", "weight", "bias"),
            fields=(Classes(),),
        ),
    ),
    spec={
        "embed": "patches",
        "position": {"kind": "learned", "length": 197},
        "layers": [LAYER],
        "norm": NORM,
        "init": {"kind": "normal", "residual": False},
    },
    layers="num_hidden_layers",
    required=("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    defaults={"image_size": 224, "patch_size": 16, "num_channels": 3},
    fields=(
        Same("hidden_size", "width"),
        Image(),
        Same("intermediate_size", "layers.*.ffn.hidden"),
        Same("num_attention_heads", "layers.*.mixer.heads"),
        Same("qkv_bias", "layers.*.mixer.bias"),
        Same("layer_norm_eps", "norm.eps", "layers.*.norm.eps"),
        Same("hidden_dropout_prob", "dropout", "layers.*.wire.dropout"),
        Same("attention_probs_dropout_prob", "layers.*.mixer.dropout"),
        Same("initializer_range", "init.spread"),
        Named("hidden_act", "layers.*.ffn.act", ACTIVATIONS),
        Follows("pooler_output_size", "width", said=lambda config: config.get("hidden_size")),
    ),
    fixed={"pooler_act": "tanh"},
    ignored=HOUSEKEEPING | {"encoder_stride"},
    tensors=(
        *EMBEDDINGS,
        *ATTENTION,
        *rows("encoder.layer.{}.layernorm_before", "layers.{}.mixer_norm", *LAYERNORM),
        *rows("encoder.layer.{}.layernorm_after", "layers.{}.ffn_norm", *LAYERNORM),
        *rows("encoder.layer.{}.intermediate.dense", "layers.{}.ffn.up", "weight", "bias"),
        *rows("encoder.layer.{}.output.dense", "layers.{}.ffn.down", "weight", "bias"),
        *rows("layernorm", "norm", *LAYERNORM),
    ),
    stale=("vit.pooler.*", "pooler.*"),
)
