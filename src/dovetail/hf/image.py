"""Images: patches, a class token and a position for each; attention under BERT's older names."""

from __future__ import annotations

from typing import Any

from dovetail.base.errors import SpecError
from dovetail.hf.convert import Conversion, PatchKernel, Unsqueeze
from dovetail.hf.field import Config, Field, Settings, value_at
from dovetail.hf.table import Row, rows
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
