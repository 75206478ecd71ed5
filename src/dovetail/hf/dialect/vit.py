"""ViT: a pre-LayerNorm encoder of image patches after a class token (Dosovitskiy et al. 2020).

Patches, a class token and a position for each; attention under BERT's older names.
"""

from __future__ import annotations

from typing import Any

from dovetail.base.errors import SpecError
from dovetail.hf.classes import Classes, classified
from dovetail.hf.convert import Conversion, PatchKernel, Unsqueeze
from dovetail.hf.field import ACTIVATIONS, Choice, Config, Copy, Field, Implied, Settings, value_at
from dovetail.hf.table import HOUSEKEEPING, LAYERNORM, Dialect, Form, Row, Skip, rows
from dovetail.model.model import Model


class Image(Field):
    """The sizes of an image and of its patches: one position per patch and one for the class token."""

    names = ("image_size", "patch_size", "num_channels")

    def to_hf(self, spec: Model) -> dict[str, Any]:
        sizes = (value_at(spec, f"embed:patches.{name}") for name in ("image", "patch", "channels"))
        return {name: value for name, value in zip(self.names, sizes, strict=True) if isinstance(value, int)}

    def from_hf(self, config: Config) -> Settings:
        image, patch, channels = (config.get(name) for name in self.names)
        for name, value in zip(self.names, (image, patch, channels), strict=True):
            if type(value) is not int or value < 1:
                raise SpecError(
                    f"config.{name}", f"{value!r} is not a whole number above 0", "only square images are supported"
                )
        positions = (image // patch) ** 2 + 1  # type: ignore[operator]
        return {"embed.image": image, "embed.patch": patch, "embed.channels": channels, "position.length": positions}


class PatchRow(Row):
    """The convolution over patches, with the number of channels of the spec."""

    def conversion(self, spec: Model, layer: int) -> Conversion:
        return PatchKernel(value_at(spec, "embed.channels"))


EMBEDDINGS = (
    Row("embeddings.cls_token", "embed.class_token", convert=Unsqueeze(0).then(Unsqueeze(0))),
    PatchRow("embeddings.patch_embeddings.projection.weight", "embed.project.weight"),
    Row("embeddings.patch_embeddings.projection.bias", "embed.project.bias"),
    Row("embeddings.position_embeddings", "position.table", convert=Unsqueeze(0)),
)
ATTENTION = (
    *rows("encoder.layer.{}.attention.attention.query", "layers.{}.mixer.q"),
    *rows("encoder.layer.{}.attention.attention.key", "layers.{}.mixer.k"),
    *rows("encoder.layer.{}.attention.attention.value", "layers.{}.mixer.v"),
    *rows("encoder.layer.{}.attention.output.dense", "layers.{}.mixer.o"),
)


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
