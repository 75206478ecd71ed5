"""Seeded bugs of additive attention and Linformer: tanh in the wrong place, documents or padding projected together."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.core.layout import TokenLayout
from dovetail.lawbook.seeded.bug import Mutant, instead, spec
from dovetail.lawbook.suite import OWN_NUMBER
from dovetail.model import Model
from dovetail.parts.mixer import additive
from dovetail.parts.mixer.additive import AdditiveAttentionModule
from dovetail.parts.mixer.linformer import LinformerModule

_scores, _dense, _mixed = AdditiveAttentionModule.scores, additive.dense, LinformerModule.mixed


def tanh_of_each(self: AdditiveAttentionModule, q: Tensor, k: Tensor) -> Tensor:
    """tanh of the query and of the key instead of their sum: then all queries have the same probs."""
    return _scores(self, q, torch.zeros_like(k)) + _scores(self, torch.zeros_like(q), k)


def mask_of_the_neighbor(mask: Any, layout: TokenLayout, key_layout: TokenLayout, heads: Tensor) -> Any:
    visible, empty = _dense(mask, layout, key_layout, heads)
    return visible.roll(1, -2), empty


def one_document(self: LinformerModule, x: Tensor, table: Tensor, layout: TokenLayout, documents: int) -> Tensor:
    """All documents of a row are projected together, and each document gets the result."""
    coefficients = F.embedding(layout.order, table) * layout.real[..., None]
    mixed = (coefficients.transpose(-1, -2) @ x.flatten(-2)).unflatten(-1, x.shape[-2:])
    return mixed if layout.start is not None else torch.cat([mixed] * documents, -3)


def padding_projected(self: LinformerModule, x: Tensor, table: Tensor, layout: TokenLayout, documents: int) -> Tensor:
    if layout.row is not None or documents > 1:
        return _mixed(self, x, table, layout, documents)
    return (F.embedding(layout.order, table).transpose(-1, -2) @ x.flatten(-2)).unflatten(-1, x.shape[-2:])


def positions_in_the_row(self: LinformerModule, x: Tensor, table: Tensor, layout: TokenLayout, documents: int) -> Tensor:
    order = torch.arange(layout.n).expand_as(layout.order)
    return _mixed(self, x, table, TokenLayout.of(order, layout.seg, layout.row, layout.start), documents)


def linformer_model() -> Model:
    """A model of two Linformer layers."""
    return spec().set("layers.*.mixer", {"kind": "linformer", "heads": 6, "head": 12, "rank": 3, "length": 45})


def additive_model() -> Model:
    """A model of two layers of additive attention."""
    return spec().set("layers.*.mixer", {"kind": "additive_attention", "heads": 2, "hidden": 10})


def mutants() -> list[Mutant]:
    """The seeded bugs of this area."""
    model = linformer_model()

    def projecting(name: str, new: Any) -> Mutant:
        return Mutant(name, "padded", instead(LinformerModule, "mixed", new), model)

    return [
        Mutant(
            "tanh is applied to query and key separately",
            OWN_NUMBER,
            instead(AdditiveAttentionModule, "scores", tanh_of_each),
            additive_model(),
        ),
        Mutant(
            "each query has the mask of its neighbor",
            "causal",
            instead(additive, "dense", mask_of_the_neighbor),
            additive_model(),
        ),
        projecting("documents of a row are projected together", one_document),
        projecting("padding is projected into keys", padding_projected),
        projecting("positions are counted from the beginning of the row", positions_in_the_row),
    ]
