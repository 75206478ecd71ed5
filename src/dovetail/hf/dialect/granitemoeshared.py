"""Granite MoE with a shared expert beside the routed ones (IBM 2025)."""

from __future__ import annotations

from typing import Any

from dovetail.hf.convert import CONCAT
from dovetail.hf.dialect.granitemoe import GRANITEMOE
from dovetail.hf.field import ACTIVATIONS, Choice, Config, Field, Settings, integer, value_at
from dovetail.hf.table import Row
from dovetail.model.model import Model

SHARED = "layers.*.ffn.shared"


class SharedSize(Field):
    """The hidden size of the shared expert; 0 is none."""

    names = ("shared_intermediate_size",)

    def to_hf(self, spec: Model) -> dict[str, Any]:
        size = value_at(spec, f"{SHARED}:glu.hidden")
        return {self.names[0]: size if isinstance(size, int) else 0}

    def from_hf(self, config: Config) -> Settings:
        size = integer(config, self.names[0], 0)
        return {SHARED: {"kind": "glu", "hidden": size} if size else None}


def shared_rows(module: str, where: str | None = None) -> tuple[Row, Row]:
    """Rows of a shared expert at a path of ours."""
    packed = (f"{module}.gate.weight", f"{module}.up.weight")
    return (
        Row("layers.{}.shared_mlp.input_linear.weight", *packed, convert=CONCAT, where=where),
        Row("layers.{}.shared_mlp.output_linear.weight", f"{module}.down.weight", where=where),
    )


GRANITEMOESHARED = GRANITEMOE.variant(
    "granitemoeshared",
    architecture="GraniteMoeSharedForCausalLM",
    fields=(SharedSize(), Choice("hidden_act", "layers.*.ffn.act", ACTIVATIONS, also=(f"{SHARED}:glu.act",))),
    tensors=shared_rows("layers.{}.ffn.shared"),
)
