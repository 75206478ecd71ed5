"""What quantization changes: the bytes of a model's weights, its perplexity on held-out text, and the speed of decoding."""

from __future__ import annotations

import dataclasses as dc
import math
import time

import torch

from dovetail.base.errors import SpecError
from dovetail.data.corpus import Corpus
from dovetail.decoding.generation import check_generates, generate_tokens
from dovetail.model.transformer import Transformer
from dovetail.nn.declared_tensors import stored
from dovetail.nn.module import evaluating

BATCH = 8  # sequences per calibration batch
DECODED = 24  # tokens over which the speed is measured, after as many of a prompt


@dc.dataclass(frozen=True)
class Measured:
    """One form of the model: bytes of its weights, perplexity on held-out text, tokens per second of decoding."""

    bytes: int
    perplexity: float | None
    tokens_per_second: float | None


def calibration_batches(corpus: Corpus, samples: int, length: int, seed: int) -> list[torch.Tensor]:
    """Calibration batches (rows, length), `samples` rows in all."""
    counts = [BATCH] * (samples // BATCH) + [samples % BATCH] * bool(samples % BATCH)
    return [corpus.batch(seed, step, rows, length).tokens for step, rows in enumerate(counts)]


def measured(model: Transformer, corpus: Corpus | None, length: int, speed: bool) -> Measured:
    """The size of a model, its perplexity on the held-out text, and the speed of decoding."""
    nbytes = sum(tensor.nbytes for _, tensor in stored(model, model.spec))
    perplexity = None
    with torch.no_grad():
        if corpus is not None and model.predicts_next:
            with evaluating(model):
                losses = [float(model.loss(batch.tokens, batch.labels)) for batch in corpus.validation(BATCH, length)]
            perplexity = math.exp(min(sum(losses) / len(losses), 700.0))
        return Measured(nbytes, perplexity, _speed(model) if speed else None)


def _speed(model: Transformer) -> float | None:
    """Tokens per second of decoding, one sequence; None for a model that does not generate."""
    try:
        check_generates(model.spec)
    except SpecError:
        return None
    if model.spec.encoder is not None:
        return None
    prompt = torch.arange(DECODED) % model.spec.vocab
    best = math.inf
    for _ in range(2):  # the first run warms up
        tokens = generate_tokens(model, prompt, DECODED)
        next(tokens)
        begin, count = time.perf_counter(), sum(1 for _ in tokens)
        best = min(best, (time.perf_counter() - begin) / max(count, 1))
    return 1 / best if best > 0 else None
