"""Images in their words: squares, a class token, a place for each; an encoder's attention under BERT's old names."""

from __future__ import annotations

from typing import Any

from dovetail.core.errors import SpecError
from dovetail.model import Model
from dovetail.port.convert import Convert, Patches, Unsqueezed
from dovetail.port.table import Config, Row, Settings, look, rows


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
