"""Denoising objectives of encoder–decoders: the encoder reads corrupted text, the decoder predicts what is missing.

    text               It was the best of times, it was the worst of times.
    span corruption    source  It was <0> of times, it was the <1> of times.        target  <0> the best <1> worst <end>
                       15 % of the tokens, in spans of 3 on average, each replaced by its own sentinel; spans are anywhere,
                       never side by side (T5's own code ends every row with one)          Raffel et al. 2020 (T5)
    denoising          source  It was <mask> of times, it <mask> was the <mask>             target  the whole text <end>
                       30 % of the tokens, in spans of Poisson(3) tokens, each replaced by one mask; a span of no tokens
                       inserts one; optionally the sentences are permuted first            Lewis et al. 2019 (BART)

Shapes: tokens (batch, n) -> source (batch, m), target (batch, t); m and t follow from n alone, so that a compiled graph serves
every batch. Spans are drawn from (seed, row in the whole batch): pieces of a batch and ranks corrupt the same tokens.
"""

from __future__ import annotations

import dataclasses as dc
import math
from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from dovetail.base.errors import InputError
from dovetail.data.corpus import Batch
from dovetail.model.model import Model, ModelModule
from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import Known, TokenLayout
from dovetail.nn.random import draw, streams, words
from dovetail.text.tokenizer import END, MASK, Tokenizer
from dovetail.training.objective import Seq2Seq, check_reads_pairs

SENTINEL = "<extra_id_{}>"  # the names of T5
SENTENCE_ENDS = (".", "!", "?", "\n")
LONGEST = 16  # tokens of a span of Poisson(3): longer ones have a probability of 1e-8


class Corrupted(NamedTuple):
    """Rows of corrupted text, and what is to be predicted."""

    source: Tensor  # (batch, m), padded on the right
    real: Tensor | None  # (batch, m) false at padding; None: there is none
    target: Tensor  # (batch, t); its last token is the end token


@dc.dataclass(frozen=True)
class Denoiser(Seq2Seq):
    """Corrupts rows of text, and predicts what is missing. The target begins behind the end token and ends with it."""

    packs: ClassVar[bool] = False

    end: int  # the id of the end token

    def corrupt(self, tokens: Tensor, layout: TokenLayout, seed: int) -> Corrupted:
        """Return the source and the target of rows of text (batch, n)."""
        raise NotImplementedError

    def arguments(self, model: ModelModule, batch: Batch, seed: int, training: bool) -> tuple[Tensor, Tensor, Ctx]:
        """Return the target as tokens and labels; the labels of the batch are not used."""
        return super().arguments(model, self.corrupted(batch, seed), seed, training)

    def corrupted(self, batch: Batch, seed: int) -> Batch:
        """Return the batch with a source and a target."""
        layout = batch.layout
        if layout.start is None:
            raise InputError(f"{self.name}: rows of one document each, without padding, are corrupted; read them so")
        source, real, target = self.corrupt(batch.tokens, layout, seed)
        tokens = torch.cat([target[:, -1:], target[:, :-1]], -1)
        target_layout, source_layout = _rows_of(layout, target), _rows_of(layout, source, real)
        return Batch(tokens, target, target_layout, source, source_layout)

    @classmethod
    def check(cls, spec: Model) -> None:
        check_reads_pairs(spec, "the corrupted text")

    def generation(self) -> dict[str, int]:
        return {"decoder_start_token_id": self.end, "eos_token_id": self.end}


@dc.dataclass(frozen=True)
class SpanCorruption(Denoiser):
    """Span corruption (T5)."""

    name, task = "span_corruption", "predicting the missing spans"

    sentinels: tuple[int, ...]  # the ids of the sentinels
    fraction: float = 0.15  # of the tokens that are missing
    span: float = 3.0  # tokens, on average

    def corrupt(self, tokens: Tensor, layout: TokenLayout, seed: int) -> Corrupted:
        rows, n = tokens.shape
        missing, spans = counts(n, self.fraction, self.span)
        if spans > len(self.sentinels):
            raise InputError(f"sentinels: {len(self.sentinels)}; {n} tokens in a row have {spans} spans; give as many")
        sentinel = torch.tensor(self.sentinels[:spans], device=tokens.device)
        gap_keys, size_keys = _keys(("span corruption: gaps", "span corruption: sizes"), layout, n, seed)
        sizes = parts(missing, spans, size_keys)
        before = sizes.cumsum(-1) - sizes  # missing tokens before each span
        gaps = gap_keys[:, : n - missing + 1].argsort(-1)[:, :spans].sort(-1).values  # between the tokens that are left
        bounds = torch.stack([gaps + before, gaps + before + sizes], -1).flatten(
            -2
        )  # (rows, 2·spans): where spans begin and end
        place = torch.arange(n, device=tokens.device).expand(rows, n).contiguous()
        segment = torch.searchsorted(bounds, place, right=True)
        hidden, number = segment % 2 == 1, (segment // 2).clamp_max(spans - 1)
        first = hidden & (place == bounds.gather(1, (segment - 1).clamp_min(0)))
        shown = ~hidden | first
        source = _put(torch.where(hidden, sentinel[number], tokens), shown.cumsum(-1) - 1, shown, n - missing + spans)
        target = _put(tokens, hidden.cumsum(-1) + number, hidden, missing + spans + 1)
        target = target.scatter(1, before + torch.arange(spans, device=tokens.device), sentinel.expand(rows, spans))
        target[:, -1] = self.end
        return Corrupted(source, None, target)

    @classmethod
    def of(cls, spec: Model, tokenizer: Tokenizer | None, length: int) -> Self:
        assert tokenizer is not None, "text has a tokenizer"
        return cls(tokenizer.id_of(END), tuple(tokenizer.id_of(name) for name in cls.special(length)))

    @classmethod
    def special(cls, length: int) -> tuple[str, ...]:
        return tuple(SENTINEL.format(i) for i in range(counts(length, cls.fraction, cls.span)[1]))


@dc.dataclass(frozen=True)
class Denoising(Denoiser):
    """Text infilling, and optionally sentence permutation (BART)."""

    name, task = "denoising", "restoring corrupted text"

    mask: int  # the id of the mask token
    fraction: float = 0.3  # of the tokens that are missing
    span: float = 3.0  # tokens, on average
    sentence_ends: tuple[int, ...] = ()  # the ids of tokens that end a sentence; where there are some, sentences are permuted

    def corrupt(self, tokens: Tensor, layout: TokenLayout, seed: int) -> Corrupted:
        n = tokens.shape[1]
        target = torch.cat([tokens, torch.full_like(tokens[:, :1], self.end)], -1)
        sentences, sizes, slots = _keys(("denoising: sentences", "denoising: sizes", "denoising: slots"), layout, n, seed)
        if self.sentence_ends:
            tokens = permuted(tokens, torch.isin(tokens, torch.tensor(self.sentence_ends, device=tokens.device)), sentences)
        missing = math.ceil(n * self.fraction)
        lengths = self._poisson(words(sizes[:, :missing])[0] * 2.0**-32)
        before = lengths.cumsum(-1) - lengths
        lengths = torch.minimum(lengths, (missing - before).clamp_min(0))
        spans = (before < missing).sum(-1, keepdim=True)  # at most one per missing token: the source is no longer than the text
        sizes_of = (n - lengths.sum(-1, keepdim=True)) + spans  # tokens of the source: those that are left, and the masks
        place = torch.arange(n, device=tokens.device).expand(tokens.shape)
        inside = place < sizes_of
        masked = _smallest(slots.masked_fill(~inside, torch.iinfo(torch.int64).max), spans)
        number = (masked.cumsum(-1) - 1).clamp(0, missing - 1)
        taken = torch.where(masked, lengths.gather(1, number), 1)  # of the text, by each token of the source
        offset = (taken.cumsum(-1) - taken).clamp_max(n - 1)
        source = torch.where(masked, self.mask, tokens.gather(1, offset))
        return Corrupted(torch.where(inside, source, self.end), inside, target)

    def _poisson(self, uniform: Tensor) -> Tensor:
        """The lengths of spans, from uniform numbers: the inverse of the cumulative distribution."""
        total, upto = 0.0, list[float]()
        for k in range(LONGEST):
            total += math.exp(-self.span) * self.span**k / math.factorial(k)
            upto.append(total)
        return torch.searchsorted(torch.tensor(upto, device=uniform.device, dtype=uniform.dtype), uniform.contiguous())

    @classmethod
    def of(cls, spec: Model, tokenizer: Tokenizer | None, length: int, permute: bool = False) -> Self:
        assert tokenizer is not None, "text has a tokenizer"
        pieces = ((token, tokenizer.decode([token])) for token in range(tokenizer.size)) if permute else ()
        ends = tuple(token for token, piece in pieces if piece.endswith(SENTENCE_ENDS))
        return cls(tokenizer.id_of(END), tokenizer.id_of(MASK), sentence_ends=ends)


def counts(n: int, fraction: float, span: float) -> tuple[int, int]:
    """How many of n tokens are missing, and in how many spans; between two of them a token is left."""
    missing = max(1, min(n - 1, round(n * fraction)))
    return missing, max(1, min(round(missing / span), missing, n - missing))


def parts(total: int, count: int, keys: Tensor) -> Tensor:
    """(rows, count) sizes of at least 1 that add up to `total`; all ways to cut it are equally probable. keys (rows, ≥ total)
    are random; the cuts are at the count − 1 smallest of them."""
    cut = _smallest(keys[:, 1:total], torch.full_like(keys[:, :1], count - 1))
    number = torch.cat([torch.zeros_like(keys[:, :1]), cut.cumsum(-1)], -1)
    return torch.zeros_like(keys[:, :1]).repeat(1, count).scatter_add(1, number, torch.ones_like(number))


def permuted(tokens: Tensor, ends: Tensor, keys: Tensor) -> Tensor:
    """The tokens (rows, n) with their sentences in a random order; `ends` (rows, n) is true at the last token of a sentence."""
    sentence = ends.cumsum(-1) - ends.long()
    return tokens.gather(1, keys.gather(1, sentence).argsort(dim=-1, stable=True))


def _rows_of(layout: TokenLayout, tokens: Tensor, real: Tensor | None = None) -> TokenLayout:
    """The layout of other tokens (rows, m) in the same rows of the whole batch."""
    rows, n = tokens.shape
    order, sample = torch.arange(n, device=tokens.device).expand(rows, n), layout.sample[:, :1].expand(rows, n)
    if real is None:
        return TokenLayout(None, order, None, start=0, sample=sample)
    return TokenLayout(None, torch.where(real, order, 0), torch.where(real, 0, -1), sample=sample, known=Known((1,) * rows, n))


def _keys(names: Sequence[str], layout: TokenLayout, n: int, seed: int) -> list[Tensor]:
    """(rows, n) 64 random bits per name, by the number of a row in the whole batch and a place in it."""
    place = torch.arange(n, device=layout.order.device)
    return [draw(stream, layout.sample[:, :1], place) for stream in streams(torch.tensor(seed), names)]


def _smallest(keys: Tensor, count: Tensor) -> Tensor:
    """(rows, n) true at the `count` (rows, 1) smallest keys of each row."""
    return keys.argsort(-1).argsort(-1) < count


def _put(values: Tensor, at: Tensor, chosen: Tensor, size: int) -> Tensor:
    """(rows, size) the chosen values at their places; the others go to one place more, which is dropped."""
    rows = torch.zeros_like(values[:, :1]).repeat(1, size + 1)
    return rows.scatter(1, torch.where(chosen, at, size), values)[:, :size]
