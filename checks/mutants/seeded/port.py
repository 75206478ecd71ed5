"""Seeded bugs of ported models: names and shapes agree, export and import are bit-equal, and the outputs differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch.nn.functional as F
from torch import Tensor

from dovetail.hf import tensors
from dovetail.hf.convert import PatchKernel
from dovetail.hf.field import Config, Settings
from dovetail.hf.layer import LOCAL, LocalAttention
from dovetail.model.model import Model
from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout
from dovetail.ops.pooling import pool
from dovetail.parts.embed import TokensModule
from dovetail.parts.head import ByClassModule, LmModule, PooledEmbeddingModule
from dovetail.parts.mixer.attention import AttentionModule
from dovetail.parts.next_sentence import NextSentenceModule
from dovetail.parts.position.absolute import LearnedModule
from dovetail.parts.position.bias import T5BiasModule
from dovetail.proof.laws.mutant import Mutant, instead
from dovetail.proof.laws.ported import in_family

_moves, _setup, _bucket, _logits = tensors.moves, AttentionModule.setup, T5BiasModule.bucket, LmModule.logits
_there, _back, _given, _taken = PatchKernel.to_hf, PatchKernel.from_hf, LocalAttention.to_hf, LocalAttention.from_hf


def exchanged(one: str, other: str) -> Callable[..., Iterator[tensors.Move]]:
    """Two of our tensors are exchanged in export and import."""

    def moves(*where: Any) -> Iterator[tensors.Move]:
        for move in _moves(*where):
            paths = tuple(path.replace(one, "?").replace(other, one).replace("?", other) for path in move.paths)
            yield move._replace(paths=paths)

    return moves


def scores_scaled(self: AttentionModule) -> None:
    """A scale of 1/√head, whatever the spec has."""
    _setup(self)
    self.scale = self.size**-0.5


def logits_not_scaled(self: LmModule, x: Tensor, ctx: Ctx) -> Tensor:
    return _logits(self, x, ctx) / self.part.scale


def sides_exchanged(self: T5BiasModule, distance: Tensor) -> Tensor:
    return _bucket(self, -distance)


def offset_ignored(self: LearnedModule, x: Tensor, layout: TokenLayout) -> Tensor:
    return x + F.embedding(layout.order, self.table)


def types_ignored(self: TokensModule, inputs: Tensor, ctx: Ctx) -> tuple[Tensor, TokenLayout]:
    return F.embedding(inputs, self.table) * self.scale + self.type_table[0], ctx.layout


def pooled_without_tanh(self: PooledEmbeddingModule, x: Tensor, ctx: Ctx) -> Tensor:
    return self.out(pool(x, ctx.layout, self.part.pooling))


def next_sentence_without_tanh(self: NextSentenceModule, x: Tensor, ctx: Ctx) -> Tensor:
    return self.dense(pool(x, ctx.layout, "first"))


def dense_layer_skipped(self: ByClassModule, x: Tensor, ctx: Ctx) -> Tensor:
    return x


def patches_transposed() -> AbstractContextManager[Any]:
    """Rows and columns of a patch are exchanged."""

    def to_hf(self: PatchKernel, ours: Sequence[Tensor]) -> list[Tensor]:
        return [one.transpose(-1, -2).contiguous() for one in _there(self, ours)]

    def from_hf(self: PatchKernel, theirs: Sequence[Tensor], shapes: Sequence[Any]) -> list[Tensor]:
        return _back(self, [one.transpose(-1, -2) for one in theirs], shapes)

    return patch.multiple(PatchKernel, to_hf=to_hf, from_hf=from_hf)


def window_to_each_side() -> AbstractContextManager[Any]:
    """A window of w reaches w to either side, not w/2."""

    def to_hf(self: LocalAttention, spec: Model) -> dict[str, Any]:
        fields = _given(self, spec)
        return {**fields, LOCAL: fields[LOCAL] // 2}

    def from_hf(self: LocalAttention, config: Config) -> Settings:
        return _taken(self, {**config, LOCAL: 2 * config[LOCAL]})

    return patch.multiple(LocalAttention, to_hf=to_hf, from_hf=from_hf)


def mutants() -> list[Mutant]:
    """The seeded bugs of this area."""
    t5, vit, keys = in_family("t5"), in_family("vit", "ViTModel"), "open-instruct#1839"
    bert, roberta = in_family("bert", "BertForMaskedLM"), in_family("roberta", "RobertaModel")
    rows: list[tuple[str, Callable[[], AbstractContextManager[Any]], Model, str]] = [
        ("query and key are exchanged", instead(tensors, "moves", exchanged(".q.", ".k.")), vit, keys),
        ("gate and up of T5 are exchanged", instead(tensors, "moves", exchanged(".gate.", ".up.")), t5, keys),
        (
            "the norms of an encoder are exchanged",
            instead(tensors, "moves", exchanged("mixer_norm", "ffn_norm")),
            in_family("bert", "BertModel"),
            keys,
        ),
        ("patches are transposed", patches_transposed, vit, keys),
        ("unscaled scores are scaled", instead(AttentionModule, "setup", scores_scaled), t5, "TransformerLens#693"),
        ("a tied head is not scaled", instead(LmModule, "logits", logits_not_scaled), t5, "TransformerLens#693"),
        ("buckets of later and earlier keys are exchanged", instead(T5BiasModule, "bucket", sides_exchanged), t5, ""),
        ("positions are read two rows early", instead(LearnedModule, "embed", offset_ignored), roberta, ""),
        ("token types are ignored", instead(TokensModule, "forward", types_ignored), bert, ""),
        ("the pooler has no tanh", instead(PooledEmbeddingModule, "forward", pooled_without_tanh), vit, ""),
        (
            "a classifier skips its dense layer",
            instead(ByClassModule, "hidden", dense_layer_skipped),
            in_family("distilbert", "DistilBertForSequenceClassification"),
            "",
        ),
        (
            "the pooler of next-sentence prediction has no tanh",
            instead(NextSentenceModule, "features", next_sentence_without_tanh),
            in_family("bert", "BertForNextSentencePrediction"),
            "",
        ),
        ("a window reaches w to each side", window_to_each_side, in_family("modernbert", "ModernBertModel"), "vllm#3385"),
    ]
    return [Mutant(name, "ported", seed, spec, report) for name, seed, spec, report in rows]
