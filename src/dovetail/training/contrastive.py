"""Contrastive learning of pairs (InfoNCE): each row's own partner among the partners of all rows of the batch.

    s = â·b̂ᵀ / temperature          â, b̂ (batch, embed): the vectors of both texts, scaled to length 1
    loss = ½ Σᵢ −log softmax(sᵢ,·)ᵢ − log softmax(s·,ᵢ)ᵢ                               both directions; a sum over rows

The other rows of the batch are the negatives: the loss of a batch is not the sum over its pieces, so it is computed whole.
                     van den Oord et al. 2018; Gao et al. 2021 (SimCSE, its temperature); Radford et al. 2021 (both directions)
"""

from __future__ import annotations

import dataclasses as dc
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.core.errors import SpecError
from dovetail.core.fold import over_vocab
from dovetail.core.loss import LossSum
from dovetail.core.module import at_least_fp32
from dovetail.data.corpus import Batch
from dovetail.model import Model, ModelModule
from dovetail.text.tokenizer import Tokenizer
from dovetail.training.objective import Objective, Reads, context
from dovetail.training.rows import from_pairs
from dovetail.training.source import Note, Shape, Source, TokenizerKind


@dc.dataclass(frozen=True)
class Contrastive(Objective):
    """InfoNCE on pairs: tokens and source of a batch are the two texts of each row."""

    name: ClassVar[str] = "contrastive"
    task: ClassVar[str] = "matching pairs"
    reads: ClassVar[Reads] = "pairs"
    by_row: ClassVar[bool] = False

    temperature: float = 0.05

    def __call__(self, model: ModelModule, batch: Batch, seed: int, training: bool) -> LossSum:
        scores, added = self.scores(model, batch, seed, training)
        return LossSum(self._loss(scores) + added * len(scores), torch.tensor(len(scores), device=scores.device))

    def evaluate(self, model: ModelModule, batch: Batch, seed: int) -> dict[str, LossSum]:
        scores, _ = self.scores(model, batch, seed, False)
        own = torch.arange(len(scores), device=scores.device)
        rows = torch.tensor(len(scores), device=scores.device)
        hits = (scores.argmax(-1) == own).sum()
        return {"loss": LossSum(self._loss(scores), rows), "retrieval_at_1": LossSum(hits.float(), rows)}

    def scores(self, model: ModelModule, batch: Batch, seed: int, training: bool) -> tuple[Tensor, Tensor]:
        """Return the scores (batch, batch) of each first text with each second one, and the mean of the losses that parts
        added to the two passes."""
        assert batch.source is not None, "a batch of pairs has the second texts"
        assert batch.source_layout is not None, "a batch of pairs has the layout of the second texts"
        vectors, added = list[Tensor](), list[Tensor]()
        for tokens, layout in ((batch.tokens, batch.layout), (batch.source, batch.source_layout)):
            ctx = context(dc.replace(batch, layout=layout), seed, training)
            vector = model(tokens, ctx)
            vectors.append(F.normalize(vector.to(at_least_fp32(vector.dtype)), dim=-1))
            added.append(ctx.with_added(vectors[-1].new_zeros(())))
        return vectors[0] @ vectors[1].T / self.temperature, torch.stack(added).mean()

    def _loss(self, scores: Tensor) -> Tensor:
        own = torch.arange(len(scores), device=scores.device)
        return (F.cross_entropy(scores, own, reduction="sum") + F.cross_entropy(scores.T, own, reduction="sum")) / 2

    @classmethod
    def check(cls, spec: Model) -> None:
        if spec.encoder is not None or "embed" not in over_vocab(spec):
            raise SpecError("embed", "pairs are of text, each read by one model", "use a spec of tokens without an encoder")
        if spec.head is None or not spec.head.pools() or spec.head.criterion != "cosine":
            raise SpecError("head", "pairs are compared by one vector per row", "--set head=pooled_embedding")

    @classmethod
    def read_pairs(cls, path: Path, spec: Model, kind: TokenizerKind | Tokenizer, shape: Shape, note: Note) -> Source:
        return from_pairs(path, spec, kind, shape, note)
