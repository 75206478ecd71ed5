"""Small model directories for the tests: ours and the same in Hugging Face layout, with weights far from initial ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dovetail.files.model_dir import save
from dovetail.files.spec import from_yaml
from dovetail.hf.write import export_directory
from dovetail.model.construction import build, generator
from dovetail.model.model import Model
from dovetail.proof.compare.transformers_side import TransformersSide

LLAMA = """
width: 48
vocab: 62
layers: [{repeat: 3, mixer: {heads: 6, kv_heads: 2, head: 8}, ffn: {hidden: 44}}]
head: {tied: false}
"""
GEMMA = """
width: 28
vocab: 62
embed: {kind: tokens, scale_by_width: true}
norm: {kind: rmsnorm, eps: 1e-6, plus_one: true}
layers:
- repeat: 2
  wire: sandwich_norm
  norm: {kind: rmsnorm, eps: 1e-6, plus_one: true}
  mixer: {heads: 6, kv_heads: 2, head: 12, scale: 0.25, softcap: 5.0, mask: [causal, {kind: window, size: 7}]}
  ffn: {hidden: 44, act: gelu_tanh}
head: {tied: true, softcap: 3.0}
"""


def written(place: Path, spec: Model, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Path, Path]:
    """A model of this spec in our own layout and in theirs."""
    model = build(spec, seed=seed, dtype=dtype)
    with torch.no_grad():
        for path, weight in model.named_parameters():
            drawn = torch.randn(weight.shape, generator=generator(seed, f"far {path}"))
            weight.copy_(weight + 0.3 * drawn if weight.dim() == 1 else 0.25 * drawn)
    save(model, spec, place / "ours")
    export_directory(place / "ours", place / "theirs")
    return place / "ours", place / "theirs"


def llama(place: Path, **more: object) -> tuple[Path, Path]:
    return written(place, from_yaml(LLAMA), **more)  # type: ignore[arg-type]


class Seeded(TransformersSide):
    """A model of transformers with one seeded bug."""

    def __init__(self, directory: Path, plant: Callable[[Any], None]) -> None:
        self.plant = plant
        super().__init__(directory)

    def load_module(self, dtype: torch.dtype | str) -> nn.Module:
        model = super().load_module(dtype)
        with torch.no_grad():
            self.plant(model)
        return model
