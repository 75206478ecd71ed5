"""Bugs of early and low-rank attention: a nonlinearity in the wrong place, documents mixed together, padding mixed in."""

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


def each_alone(self: AdditiveAttentionModule, q: Tensor, k: Tensor) -> Tensor:
    """tanh of the query and of the key, not of their sum: then no query prefers another key than its neighbors do."""
    return _scores(self, q, torch.zeros_like(k)) + _scores(self, torch.zeros_like(q), k)


def mask_of_the_neighbor(mask: Any, layout: TokenLayout, key_layout: TokenLayout, heads: Tensor) -> Any:
    seen, empty = _dense(mask, layout, key_layout, heads)
    return seen.roll(1, -2), empty


def one_document(self: LinformerModule, x: Tensor, table: Tensor, layout: TokenLayout, documents: int) -> Tensor:
    """All of a row mixed together, given to each document."""
    share = F.embedding(layout.order, table) * layout.real[..., None]
    mixed = (share.transpose(-1, -2) @ x.flatten(-2)).unflatten(-1, x.shape[-2:])
    return mixed if layout.start is not None else torch.cat([mixed] * documents, -3)


def padding_is_mixed_in(self: LinformerModule, x: Tensor, table: Tensor, layout: TokenLayout, documents: int) -> Tensor:
    if layout.row is not None or documents > 1:
        return _mixed(self, x, table, layout, documents)
    return (F.embedding(layout.order, table).transpose(-1, -2) @ x.flatten(-2)).unflatten(-1, x.shape[-2:])


def by_place_in_the_row(self: LinformerModule, x: Tensor, table: Tensor, layout: TokenLayout, documents: int) -> Tensor:
    order = torch.arange(layout.n).expand_as(layout.order)
    return _mixed(self, x, table, TokenLayout.of(order, layout.seg, layout.row, layout.start), documents)


def low_rank() -> Model:
    """Two layers of an encoder."""
    return spec().set("layers.*.mixer", {"kind": "linformer", "heads": 6, "head": 12, "rank": 3, "length": 45})


def scored() -> Model:
    """The score of 2014."""
    return spec().set("layers.*.mixer", {"kind": "additive_attention", "heads": 2, "hidden": 10})


def mutants() -> list[Mutant]:
    """The rows."""
    model = low_rank()

    def mixing(name: str, new: Any) -> Mutant:
        return Mutant(name, "padded", instead(LinformerModule, "mixed", new), model)

    return [
        Mutant(
            "query and key are bent each alone", OWN_NUMBER, instead(AdditiveAttentionModule, "scores", each_alone), scored()
        ),
        Mutant("each query has its neighbor's mask", "causal", instead(additive, "dense", mask_of_the_neighbor), scored()),
        mixing("documents of a row are mixed together", one_document),
        mixing("padding is mixed into keys", padding_is_mixed_in),
        mixing("places are counted from the row's beginning", by_place_in_the_row),
    ]
