"""Translation: an encoder–decoder is trained on pairs of texts, source → target.

    source   s s s s             tokens   E t t t          labels   t t t E          E: the end token

At evals some held-out sources are translated by beam search, and compared with their targets: exact match, and BLEU
(training/bleu.py). All ranks have the same held-out rows, and decode them together. Pairs of which a text is longer than
`length` tokens are left out, and counted.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from dovetail.core.errors import FileError, SpecError, UsageError
from dovetail.core.layout import TokenLayout
from dovetail.core.loss import IGNORED, LossSum
from dovetail.data.corpus import Batch
from dovetail.data.rows import held_out_rows, read_pairs
from dovetail.decoding.beam import MOST, beam_search
from dovetail.model import Model, ModelModule
from dovetail.text.tokenizer import END, Tokenizer
from dovetail.training.bleu import bleu, counts
from dovetail.training.objective import NOT_A_SETTING, Reads, Seq2Seq, Setup, check_reads_pairs
from dovetail.training.rows import FRACTION, row_source
from dovetail.training.source import Note, Rows, Shape, Source, TokenizerKind, tokenizer_for

DECODED = 64  # held-out pairs that are translated at an eval
DECODE = "decode"  # the name of what says so, per row
BLEU = "bleu."  # of the counts of BLEU


@dc.dataclass(frozen=True)
class Translation(Seq2Seq):
    """The target from the source."""

    name: ClassVar[str] = "translation"
    task: ClassVar[str] = "predicting the target from the source"
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
        found = super().metrics({name: mean for name, mean in means.items() if not name.startswith(BLEU)})
        if "exact_match" not in means:
            return found
        orders = {name[len(BLEU) : -2] for name in means if name.startswith(BLEU)}
        return {**found, "bleu": bleu({name: (means[f"{BLEU}{name}.0"], means[f"{BLEU}{name}.1"]) for name in orders})}

    @classmethod
    def check(cls, spec: Model) -> None:
        check_reads_pairs(spec, "the source")

    @classmethod
    def of(cls, spec: Model, tokenizer: Tokenizer | None, length: int) -> Self:
        assert tokenizer is not None, "text has a tokenizer"
        return cls(tokenizer, length)

    @classmethod
    def read_pairs(cls, path: Path, spec: Model, kind: TokenizerKind | Tokenizer, shape: Shape, note: Note) -> Source:
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
