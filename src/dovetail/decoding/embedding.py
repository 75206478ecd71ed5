"""Embeddings: one vector of length 1 per text, and scores of pairs of texts.

    vector = pool(hidden states) / ‖·‖            pooling: mean, last, or cls (the first token)
    score  = σ(answer of the head) of a pair      where the head has one number per document; else the cosine of two embeddings

A head that embeds (pooled_embedding) computes the vector itself, unless a pooling is chosen. Otherwise a causal model has
`last`, since its last token alone has seen the text, and another `mean`. Every text runs alone: no other text changes a bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.base.errors import InputError, SpecError
from dovetail.model.model import Model, ModelModule
from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout
from dovetail.nn.module import evaluating
from dovetail.ops.pooling import Pool, pool
from dovetail.spec.fold import over_vocab, position_limit

Pooling = Literal["mean", "last", "cls"]
POOLS: dict[Pooling, Pool] = {"mean": "mean", "last": "last", "cls": "first"}


def check_embeds(spec: Model) -> None:
    """Raise SpecError unless the model reads tokens."""
    if "embed" not in over_vocab(spec):
        raise SpecError("embed", "the model reads no tokens, so it has no embeddings of text", "use a model of text")


class Embedder:
    """A model that embeds token ids."""

    def __init__(self, model: ModelModule, pooling: Pooling | None = None) -> None:
        check_embeds(model.part)
        spec = model.part
        self.model, self.longest = model, position_limit(spec)
        self.by_head = pooling is None and spec.head is not None and spec.head.embeds
        causal = spec.encoder is None and spec.ahead() is not None
        self.pooling: Pool = POOLS[pooling or ("last" if causal else "mean")]

    @property
    def ranks(self) -> bool:
        """Whether the head scores pairs."""
        head = self.model.part.head
        return head is not None and head.ranks()

    @torch.inference_mode()
    def vector(self, ids: Sequence[int]) -> Tensor:
        """The embedding (width,) of token ids: float32, of length 1, on the CPU."""
        x, ctx = self._hidden(ids, None)
        pooled = self.model.head(x, ctx) if self.by_head else pool(x, ctx.layout, self.pooling)
        vector = F.normalize(pooled[0].double(), dim=-1).float().cpu()
        if not bool(vector.isfinite().all()):
            raise InputError("the embedding is not finite; the weights or the input are not sound")
        return vector

    @torch.inference_mode()
    def score(self, ids: Sequence[int], types: Sequence[int] | None = None) -> float:
        """The score in 0 to 1 of a pair of texts, given as the token ids of both and their token types."""
        x, ctx = self._hidden(ids, types)
        return float(torch.sigmoid(self.model.head(x, ctx)[0, 0].double()))

    def _hidden(self, ids: Sequence[int], types: Sequence[int] | None) -> tuple[Tensor, Ctx]:
        model, vocab = self.model, self.model.part.vocab
        if not ids or min(ids) < 0 or max(ids) >= vocab:
            raise InputError(f"input: has no token, or an id outside 0 to {vocab - 1}")
        if self.longest is not None and len(ids) > self.longest:
            raise InputError(f"input: has {len(ids):,} tokens; the model takes at most {self.longest:,}")
        tokens = torch.tensor([list(ids)], device=model.device)
        given = None if types is None else torch.tensor([list(types)], device=model.device)
        ctx = Ctx(layout=TokenLayout.whole(1, len(ids), model.device), types=given, ranks=model.ranks)
        with evaluating(model):
            if model.part.encoder is None:
                return model.hidden(tokens, ctx)
            x, layout = model.encode(tokens, ctx)
            return x, Ctx(layout=layout, ranks=model.ranks)


def shortened(vector: Tensor, dimensions: int | None) -> Tensor:
    """The first `dimensions` numbers of an embedding, scaled to length 1 again (Kusupati et al. 2022, Matryoshka)."""
    if dimensions is None:
        return vector
    if not 1 <= dimensions <= len(vector):
        raise SpecError("dimensions", f"{dimensions} is not from 1 to {len(vector)}, the width of the embeddings")
    return F.normalize(vector[:dimensions].double(), dim=-1).float()
