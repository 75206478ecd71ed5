"""Seeded bugs of early attention and Linformer: tanh in the wrong place, padding seen, documents projected together."""

from __future__ import annotations

import dataclasses as dc
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.model.model import Model
from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout
from dovetail.nn.softmax import CrossModule
from dovetail.ops.attend import WHOLE
from dovetail.parts.mixer import additive
from dovetail.parts.mixer.additive import AdditiveAttentionModule, MultiplicativeCrossModule
from dovetail.parts.mixer.linformer import LinformerModule
from dovetail.proof.laws.mutant import Mutant, instead, spec
from dovetail.proof.laws.suite import OWN_NUMBER
from dovetail.spec.part import from_data

_scores, _dense, _mixed = AdditiveAttentionModule.scores, additive.dense, LinformerModule.mixed
_fill = CrossModule.fill


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


def source_padding_seen(mask: Any, layout: TokenLayout, key_layout: TokenLayout, heads: Tensor) -> Any:
    visible, empty = _dense(mask, layout, key_layout, heads)
    return torch.ones_like(visible), torch.zeros_like(empty)


def stored_once_more(self: CrossModule, ctx: Ctx, view: Any) -> Any:
    """At admission the entries of a source are stored of its first token only."""
    assert ctx.encoder_output is not None
    if view is WHOLE:
        return _fill(self, ctx, view)
    return _fill(self, dc.replace(ctx, encoder_output=ctx.encoder_output[..., :1, :].expand_as(ctx.encoder_output)), view)


def cross_model(kind: str) -> Model:
    """A recurrent encoder–decoder with attention (2014, 2015)."""
    encoder = {"width": 28, "vocab": 62, "head": None, "layers": [{"mixer": {"kind": "gru", "inner": 20}}]}
    layers = [{"mixer": {"kind": "gru", "inner": 20}, "cross": {"kind": kind, "heads": 2}}] * 2
    return from_data({"width": 28, "vocab": 62, "encoder": encoder, "layers": layers}, Model)


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
        Mutant(
            "additive cross attention sees the padding of a source",
            "padded",
            instead(additive, "dense", source_padding_seen),
            cross_model("additive_attention"),
        ),
        Mutant(
            "of a source its first token is stored",
            "chunked",
            instead(MultiplicativeCrossModule, "fill", stored_once_more),
            cross_model("multiplicative_attention"),
        ),
        projecting("documents of a row are projected together", one_document),
        projecting("padding is projected into keys", padding_projected),
        projecting("positions are counted from the beginning of the row", positions_in_the_row),
    ]
