"""Quantization-aware training: a model computes with rounded weights and trains the weights behind them.

    Ŵ = W + (decode(encode(W)) − W) without gradient              dL/dW = dL/dŴ: the straight-through estimator

    fake_quantize(model, recipe)        train the model as any other: its parameters, names and files stay
    finish(model)                       the same outputs, with the matrices stored in their formats

An adapter without parameters does it, so that every path of a part uses it. Scales are fitted anew in each pass. Bengio et al.
2013; Jacob et al. 2017.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from dovetail.base.errors import SpecError
from dovetail.model.transformer import Transformer
from dovetail.nn.ctx import Ctx
from dovetail.nn.linear import Adapter, Linear, Offer, Rows
from dovetail.ops.formats.format import Format
from dovetail.weights.quantization.recipe import Recipe, leaf_at, quantize


class FakeQuantizer(Adapter):
    """Rounds the W of a leaf in every pass."""

    exact: frozenset[Offer] = frozenset({"grouped", "matrix"})
    freezes = False
    removed_by = "end quantization-aware training first (finish)"

    def __init__(self, format: Format) -> None:
        super().__init__()
        self.format = format

    def matrix(self, leaf: Linear, ctx: Ctx | None = None) -> Tensor:
        w = leaf.dense()
        return w + (self.format.decode(self.format.encode(w.detach()), leaf.in_features).to(w.dtype) - w.detach())

    def forward(self, leaf: Linear, x: Tensor, ctx: Ctx | None) -> Tensor:
        bias = leaf.bias
        return F.linear(x, self.matrix(leaf).to(x.dtype), None if bias is None else bias.to(x.dtype))

    def grouped(self, leaf: Linear, x: Tensor, rows: Rows, ctx: Ctx | None) -> Tensor:
        y = rows.multiply(x, self.matrix(leaf).to(x.dtype))
        return y if leaf.bias is None else y + leaf.bias.index_select(0, rows.expert)

    def extra_repr(self) -> str:
        """Its format."""
        return str(self.format)


def fake_quantize(model: nn.Module, recipe: Recipe) -> None:
    """Let the leaves of a recipe compute with rounded weights, in place."""
    for path, format in recipe.items():
        leaf = leaf_at(model, path)
        if leaf.adapter is not None:
            raise SpecError(
                path, f"has an adapter ({type(leaf.adapter).__name__})", "merge it before quantization-aware training"
            )
        leaf.adapter = FakeQuantizer(format).train(leaf.training)


def finish(model: Transformer) -> Recipe:
    """Store the matrices that were rounded in every pass in their formats, in place; returns the recipe."""
    recipe: dict[str, Format] = {}
    for path, leaf in model.named_modules():
        if isinstance(leaf, Linear) and isinstance(leaf.adapter, FakeQuantizer):
            recipe[path], leaf.adapter = leaf.adapter.format, None
    quantize(model, model.part, recipe)
    return recipe
