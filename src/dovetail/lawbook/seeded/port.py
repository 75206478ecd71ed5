"""Bugs of ported models: all keys and shapes agree, there and back is bit for bit, and the numbers are another model's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch.nn.functional as F
from torch import Tensor

from dovetail.core.ctx import Ctx
from dovetail.core.layout import TokenLayout
from dovetail.lawbook.ported import in_family
from dovetail.lawbook.seeded.bug import Mutant, instead
from dovetail.model import Model
from dovetail.parts.embed import TokensModule
from dovetail.parts.head import ByClassModule, LmModule, PooledEmbeddingModule, pool
from dovetail.parts.mixer.attention import AttentionModule
from dovetail.parts.position.learned import LearnedModule
from dovetail.parts.position.t5_bias import T5BiasModule
from dovetail.port import tensors
from dovetail.port.convert import PatchKernel
from dovetail.port.field import Config, Settings
from dovetail.port.layer import LOCAL, LocalAttention

_moves, _setup, _bucket, _logits = tensors.moves, AttentionModule.setup, T5BiasModule.bucket, LmModule.logits
_there, _back, _given, _taken = PatchKernel.to_hf, PatchKernel.from_hf, LocalAttention.to_hf, LocalAttention.from_hf


def crossed(one: str, other: str) -> Callable[..., Iterator[tensors.Move]]:
    """Two of our tensors taken for each other on both roads."""

    def moves(*where: Any) -> Iterator[tensors.Move]:
        for move in _moves(*where):
            paths = tuple(path.replace(one, "?").replace(other, one).replace("?", other) for path in move.paths)
            yield move._replace(paths=paths)

    return moves


def scores_scaled(self: AttentionModule) -> None:
    """1/√head whatever the spec says."""
    _setup(self)
    self.scale = self.size**-0.5


def logits_not_scaled(self: LmModule, x: Tensor, ctx: Ctx) -> Tensor:
    return _logits(self, x, ctx) / self.part.scale


def later_is_earlier(self: T5BiasModule, distance: Tensor) -> Tensor:
    return _bucket(self, -distance)


def offset_forgotten(self: LearnedModule, x: Tensor, layout: TokenLayout) -> Tensor:
    return x + F.embedding(layout.order, self.table)


def types_forgotten(self: TokensModule, inputs: Tensor, ctx: Ctx) -> tuple[Tensor, TokenLayout]:
    return F.embedding(inputs, self.table) * self.scale + self.type_table[0], ctx.layout


def pooled_without_tanh(self: PooledEmbeddingModule, x: Tensor, ctx: Ctx) -> Tensor:
    return self.out(pool(x, ctx.layout, self.part.pooling))


def classes_without_layer(self: ByClassModule, x: Tensor, ctx: Ctx) -> Tensor:
    return x


def squares_on_their_side() -> AbstractContextManager[Any]:
    """Rows of a square for its columns."""

    def to_hf(self: PatchKernel, ours: Sequence[Tensor]) -> list[Tensor]:
        return [one.transpose(-1, -2).contiguous() for one in _there(self, ours)]

    def from_hf(self: PatchKernel, theirs: Sequence[Tensor], shapes: Sequence[Any]) -> list[Tensor]:
        return _back(self, [one.transpose(-1, -2) for one in theirs], shapes)

    return patch.multiple(PatchKernel, to_hf=to_hf, from_hf=from_hf)


def window_to_each_side() -> AbstractContextManager[Any]:
    """A window of w reaches w to either side, not half of it."""

    def to_hf(self: LocalAttention, spec: Model) -> dict[str, Any]:
        said = _given(self, spec)
        return {**said, LOCAL: said[LOCAL] // 2}

    def from_hf(self: LocalAttention, config: Config) -> Settings:
        return _taken(self, {**config, LOCAL: 2 * config[LOCAL]})

    return patch.multiple(LocalAttention, to_hf=to_hf, from_hf=from_hf)


def mutants() -> list[Mutant]:
    """The rows."""
    t5, vit, keys = in_family("t5"), in_family("vit", "ViTModel"), "open-instruct#1839"
    bert, roberta = in_family("bert", "BertForMaskedLM"), in_family("roberta", "RobertaModel")
    rows: list[tuple[str, Callable[[], AbstractContextManager[Any]], Model, str]] = [
        ("query and key are exchanged", instead(tensors, "moves", crossed(".q.", ".k.")), vit, keys),
        ("a gate is taken for what it gates", instead(tensors, "moves", crossed(".gate.", ".up.")), t5, keys),
        (
            "an encoder's norms are exchanged",
            instead(tensors, "moves", crossed("mixer_norm", "ffn_norm")),
            in_family("bert", "BertModel"),
            keys,
        ),
        ("squares lie on their side", squares_on_their_side, vit, keys),
        ("unscaled scores are scaled", instead(AttentionModule, "setup", scores_scaled), t5, "TransformerLens#693"),
        ("a tied head is not scaled", instead(LmModule, "logits", logits_not_scaled), t5, "TransformerLens#693"),
        ("later keys are taken for earlier", instead(T5BiasModule, "bucket", later_is_earlier), t5, ""),
        ("positions are read two rows early", instead(LearnedModule, "embed", offset_forgotten), roberta, ""),
        ("types of tokens are forgotten", instead(TokensModule, "forward", types_forgotten), bert, ""),
        ("the pooler has no tanh", instead(PooledEmbeddingModule, "forward", pooled_without_tanh), vit, ""),
        (
            "a classifier skips its own layer",
            instead(ByClassModule, "hidden", classes_without_layer),
            in_family("distilbert", "DistilBertForSequenceClassification"),
            "",
        ),
        ("a window reaches w to each side", window_to_each_side, in_family("modernbert", "ModernBertModel"), "vllm#3385"),
    ]
    return [Mutant(name, "ported", plant, spec, report) for name, plant, spec, report in rows]
