"""Objectives of pairs of texts: a contrastive loss for models of one vector per text, translation for encoder–decoders.

    contrastive   s = â·b̂ᵀ / temperature          â, b̂ (batch, embed): the vectors of both texts, scaled to length 1
                  loss = ½ Σᵢ −log softmax(sᵢ,·)ᵢ − log softmax(s·,ᵢ)ᵢ                    both directions; a sum over rows

    translation   source   s s s s             tokens   E t t t          labels   t t t E          E: the end token

The other rows of the batch are the negatives of a contrastive loss (InfoNCE), which is computed whole: it is not the sum over
pieces of the batch. At evals some held-out sources are translated by beam search, and compared with their targets: exact match,
and BLEU. All ranks have the same held-out rows, and decode them together. Pairs of which a text is longer than `length` tokens
are left out of translation, and counted.

    BLEU = min(1, e^{1 − r/c}) · (p₁ p₂ p₃ p₄)^{1/4}        p_n = Σ clipped matches / Σ n-grams,   c and r words of both

Words are separated by white space, and case counts. Orders that no translation is long enough for are left out. The counts of
several batches add up, so each p_n is a sum with its count.
                     van den Oord et al. 2018; Gao et al. 2021 (SimCSE, its temperature); Radford et al. 2021 (both directions);
                     Papineni et al. 2002 (BLEU)
"""

from __future__ import annotations

import dataclasses as dc
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.base.errors import FileError, SpecError, UsageError
from dovetail.data.corpus import Batch
from dovetail.data.rows import held_out_rows, read_pairs
from dovetail.decoding.beam import MOST, beam_search
from dovetail.model.model import Model, ModelModule
from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout
from dovetail.nn.loss import IGNORED, LossSum
from dovetail.nn.module import at_least_fp32
from dovetail.spec.fold import over_vocab
from dovetail.text.tokenizer import END, Tokenizer
from dovetail.training.objective import NOT_A_SETTING, Objective, Reads, Seq2Seq, Setup, check_reads_pairs, run_sides, sides
from dovetail.training.rows import FRACTION, PaddedTexts, row_source
from dovetail.training.source import BatchShape, Note, Rows, Source, TokenizerKind, tokenizer_for

# -- contrastive learning ---------------------------------------------------------------------------------------------


@dc.dataclass(frozen=True)
class Contrastive(Objective):
    """InfoNCE on pairs: tokens and source of a batch are the two texts of each row."""

    name, task = "contrastive", "matching pairs"
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

        def embedded(tokens: Tensor, labels: Tensor, ctx: Ctx) -> Tensor:
            vector = model(tokens, ctx)
            return F.normalize(vector.to(at_least_fp32(vector.dtype)), dim=-1)

        (first, second), added = run_sides(batch, sides(batch), seed, training, embedded)
        return first @ second.T / self.temperature, added

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
    def read_pairs(cls, path: Path, spec: Model, kind: TokenizerKind | Tokenizer, shape: BatchShape, note: Note) -> Source:
        data = read_pairs(path)
        train, held_out = held_out_rows(len(data.first), FRACTION)
        joined = "\n".join(text for i in train for text in (data.first[i], data.second[i]))
        tokenizer, settings = tokenizer_for(path, joined, spec, kind, note)
        first, second = (PaddedTexts(texts, tokenizer, shape.length) for texts in (data.first, data.second))

        def make(rows: Rows) -> Batch:
            none = torch.zeros(len(rows), dtype=torch.long)  # the partner of a row is its label
            after = second.layout(rows).numbered(len(rows))  # dropout differs between the two texts
            return Batch(first.tokens[rows], none, first.layout(rows), second.tokens[rows], after)

        whole = held_out[: max(len(held_out) // shape.batch * shape.batch, min(len(held_out), shape.batch))]  # equal candidates
        return row_source(path, make, train, whole, shape, tokenizer, {"pairs": str(path), **settings}, data.sha256)


# -- BLEU -------------------------------------------------------------------------------------------------------------


ORDER = 4
LENGTHS = "lengths"  # words of the translations per word of the references


def counts(translations: Sequence[str], references: Sequence[str]) -> dict[str, tuple[int, int]]:
    """(matches, n-grams) by order `1` … `4`, and `lengths`: (words of the translations, words of the references)."""
    both = [(one.split(), other.split()) for one, other in zip(translations, references, strict=True)]
    result = {LENGTHS: (sum(len(one) for one, _ in both), sum(len(other) for _, other in both))}
    for n in range(1, ORDER + 1):
        pairs = [(_ngrams(one, n), _ngrams(other, n)) for one, other in both]
        result[str(n)] = (sum((one & other).total() for one, other in pairs), sum(one.total() for one, _ in pairs))
    return result


def bleu(sums: Mapping[str, tuple[float, float]]) -> float:
    """BLEU, from 0 to 1, of counts that were summed over a corpus."""
    words, expected = sums[LENGTHS]
    orders = [sums[str(n)] for n in range(1, ORDER + 1) if sums[str(n)][1]]
    if not words or any(not matches for matches, _ in orders):
        return 0.0
    precision = math.exp(sum(math.log(matches / total) for matches, total in orders) / len(orders))
    return min(1.0, math.exp(1 - expected / words)) * precision


def _ngrams(words: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))


# -- translation ------------------------------------------------------------------------------------------------------


DECODED = 64  # held-out pairs that are translated at an eval
DECODE = "decode"  # the name of what says so, per row
BLEU = "bleu."  # of the counts of BLEU


@dc.dataclass(frozen=True)
class Translation(Seq2Seq):
    """The target from the source."""

    name, task = "translation", "predicting the target from the source"
    reads: ClassVar[Reads] = "pairs"

    tokenizer: Tokenizer = dc.field(metadata=NOT_A_SETTING)
    length: int = dc.field(metadata=NOT_A_SETTING)
    beams: int = 4  # of the search at evals

    def prepare(self, source: Source, setup: Setup) -> tuple[Self, Source]:
        if not 1 <= self.beams <= MOST:  # before the first step, not at the first eval
            raise UsageError(f"--beams: {self.beams} is not from 1 to {MOST}")
        return self, source

    def evaluate(self, model: ModelModule, batch: Batch, seed: int) -> dict[str, LossSum]:
        return {**super().evaluate(model, batch, seed), **self._translated(model, batch)}

    def _translated(self, model: ModelModule, batch: Batch) -> dict[str, LossSum]:
        """The sums of exact matches and of BLEU, over the rows of the batch that are decoded."""
        assert batch.source is not None
        assert batch.source_layout is not None
        end, found, wanted = self.tokenizer.id_of(END), list[str](), list[str]()
        for i in batch.extra[DECODE].nonzero().flatten().tolist():
            source = batch.source[i][batch.source_layout.real[i]]
            with torch.compiler.set_stance("force_eager"):  # no graph per length
                best = beam_search(model, source, self.length, beams=self.beams, stop={end}, start=[end])[0].tokens
            found.append(self.tokenizer.decode([token for token in best if token != end]))
            target = batch.labels[i][batch.labels[i] != IGNORED].tolist()
            wanted.append(self.tokenizer.decode([token for token in target if token != end]))
        hits = sum(one == other for one, other in zip(found, wanted, strict=True))
        sums = {"exact_match": (hits, len(found))}
        for name, both in counts(found, wanted).items():  # counts per batch, of which BLEU takes ratios
            sums |= {f"{BLEU}{name}.{i}": (count, 1) for i, count in enumerate(both)}
        return {name: LossSum(_number(total, model), _number(count, model)) for name, (total, count) in sums.items()}

    def metrics(self, means: Mapping[str, float]) -> dict[str, float]:
        result = super().metrics({name: mean for name, mean in means.items() if not name.startswith(BLEU)})
        if "exact_match" not in means:
            return result
        orders = {name[len(BLEU) : -2] for name in means if name.startswith(BLEU)}
        return {**result, "bleu": bleu({name: (means[f"{BLEU}{name}.0"], means[f"{BLEU}{name}.1"]) for name in orders})}

    @classmethod
    def check(cls, spec: Model) -> None:
        check_reads_pairs(spec, "the source")

    @classmethod
    def of(cls, spec: Model, tokenizer: Tokenizer | None, length: int) -> Self:
        assert tokenizer is not None, "text has a tokenizer"
        return cls(tokenizer, length)

    @classmethod
    def read_pairs(cls, path: Path, spec: Model, kind: TokenizerKind | Tokenizer, shape: BatchShape, note: Note) -> Source:
        data = read_pairs(path)
        train, _ = held_out_rows(len(data.first), FRACTION)
        joined = "\n".join(text for i in train for text in (data.first[i], data.second[i]))
        tokenizer, settings = tokenizer_for(path, joined, spec, kind, note)
        assert spec.encoder is not None
        if tokenizer.size > spec.encoder.vocab:
            what = f"{spec.encoder.vocab}; the tokenizer has {tokenizer.size} tokens"
            raise SpecError("encoder.vocab", what, f"--set encoder.vocab={tokenizer.size}")
        both = list(zip(tokenizer.encode_batch(data.first), tokenizer.encode_batch(data.second), strict=True))
        rows = [i for i, (one, other) in enumerate(both) if 0 < len(one) <= shape.length and len(other) < shape.length]
        if len(rows) < len(both):
            what = f"{len(both) - len(rows):,} of {len(both):,} pairs are longer than {shape.length:,} tokens"
            if not rows:
                raise FileError(f"{path}: {what}; give a larger --length")
            note(f"{path}: {what} and left out")
        pairs, end = [both[i] for i in rows], tokenizer.id_of(END)
        train, held_out = held_out_rows(len(pairs), FRACTION)
        decoded = torch.zeros(len(pairs), dtype=torch.bool)
        decoded[held_out[:: -(-len(held_out) // DECODED)]] = True

        def make(rows: Rows) -> Batch:
            sources, source_layout = _padded([pairs[i][0] for i in rows])
            labels, layout = _padded([np.append(pairs[i][1], end) for i in rows])
            tokens = torch.cat([torch.full_like(labels[:, :1], end), labels[:, :-1]], 1)
            labels = labels.masked_fill(~layout.real, IGNORED)
            # samples of the source differ from those of the target, as in a whole batch of both: dropout differs
            return Batch(tokens, labels, layout, sources, source_layout.numbered(len(rows)), {DECODE: decoded[rows]})

        return row_source(path, make, train, held_out, shape, tokenizer, {"pairs": str(path), **settings}, data.sha256)

    def generation(self) -> dict[str, int]:
        end = self.tokenizer.id_of(END)
        return {"decoder_start_token_id": end, "eos_token_id": end}


def _number(value: int, model: ModelModule) -> Tensor:
    return torch.tensor(float(value), device=model.device)


def _padded(rows: list[np.ndarray[tuple[int], np.dtype[np.int64]]]) -> tuple[Tensor, TokenLayout]:
    """(rows, n) ids padded on the right, and their layout."""
    tokens = torch.zeros(len(rows), max(len(row) for row in rows), dtype=torch.long)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = torch.from_numpy(ids)
    return tokens, TokenLayout.padded([len(row) for row in rows], tokens.shape[1])
