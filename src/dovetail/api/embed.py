"""embed and rerank: vectors of texts, and documents by their relevance to a query.

dt.embed("Qwen3-Embedding-0.6B", ["a cat", "a dog"])                  (2, width) in float32, each of length 1
dt.rerank("bge-reranker", "who purrs?", ["a cat", "a dog"])           [Ranked(index=0, score=0.97), Ranked(index=1, score=0.02)]
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from dovetail.api.models import load
from dovetail.base.errors import InputError
from dovetail.decoding.embedding import Embedder, Pooling, shortened
from dovetail.model.transformer import Transformer
from dovetail.nn.finite import check_weights
from dovetail.text.tokenizer import Tokenizer


@dc.dataclass(frozen=True)
class Ranked:
    """A document, by its index, and its relevance."""

    index: int
    score: float


def embed(
    model: Transformer | str | Path,
    texts: Sequence[str | Sequence[int]],
    *,
    pooling: Pooling | None = None,
    dimensions: int | None = None,
) -> Tensor:
    """Return the embedding of each text, or of each list of token ids: (texts, width) in float32, each of length 1.

    `pooling` is that of the spec's head by default; without one, the last token of a causal model and the mean of another.
    `dimensions` keeps the first numbers of each vector, which is scaled to length 1 again.
    """
    embedder, tokenizer = _opened(model, pooling)
    vectors = [embedder.vector(_tokenizer(tokenizer).prompt(text) if isinstance(text, str) else text) for text in texts]
    width = embedder.model.part.width if dimensions is None else dimensions
    return torch.stack([shortened(vector, dimensions) for vector in vectors]) if vectors else torch.zeros(0, width)


def rerank(
    model: Transformer | str | Path,
    query: str,
    documents: Sequence[str],
    *,
    pooling: Pooling | None = None,
    top_n: int | None = None,
) -> list[Ranked]:
    """Return the documents by their relevance to a query, the most relevant first; `top_n` of them if it is given.

    A head with one number per document scores each pair, by its sigmoid; otherwise the score is the cosine of the embeddings.
    """
    embedder, found = _opened(model, pooling)
    tokenizer = _tokenizer(found)
    if embedder.ranks:
        scores = [embedder.score(*tokenizer.pair(query, document)) for document in documents]
    else:
        asked = embedder.vector(tokenizer.prompt(query))
        scores = [float(asked @ embedder.vector(tokenizer.prompt(document))) for document in documents]
    ranked = sorted((Ranked(i, score) for i, score in enumerate(scores)), key=lambda one: (-one.score, one.index))
    return ranked[:top_n]


def _opened(model: Transformer | str | Path, pooling: Pooling | None) -> tuple[Embedder, Tokenizer | None]:
    if not isinstance(model, Transformer):
        model = load(model)
    check_weights(model, model.spec)
    return Embedder(model.eval(), pooling), model.tokenizer


def _tokenizer(tokenizer: Tokenizer | None) -> Tokenizer:
    if tokenizer is None:
        raise InputError("texts: are strings, but the model has no tokenizer; give token ids to dt.embed")
    return tokenizer
