"""Tasks of recall: the answer stands in the row, and must be found by content.

mqar              k₁ v₁ k₂ v₂ … · · k₂ · k₁ ·     at each later key: its value              (Arora et al. 2023)
induction         d a ! b c a d … !               at the end: the token after the first mark  (Olsson et al. 2022)
selective_copy    a · · b · c · · ? ? ?           at each question: the next symbol         (Gu & Dao 2023)
"""

from __future__ import annotations

import torch
from torch import Tensor

from dovetail.data.tasks.task import BatchDraw, SyntheticTask
from dovetail.spec.field import bounded
from dovetail.spec.part import register

MOST = 2**16  # pairs, symbols or items of a task
FILLER, ASK, MARK = 0, 1, 0


@register("mqar")
class Mqar(SyntheticTask):
    """Multi-query associative recall: `pairs` distinct keys, each followed by its value; every key is asked once.

    With m = ⌊(vocab − 1) / 2⌋: token 0 is the filler, 1 … m are keys, m + 1 … 2m are values. A row begins with k₁ v₁ … kₚ vₚ:
    the keys are distinct, the values independent and uniform. Of the remaining length − 2p positions, p are chosen uniformly;
    the keys stand there in random order, each labeled with its value. All others are the filler, which is no key: it never
    overwrites one. Values are not shown again. Chance is 1/m.
    """

    pairs: int = bounded(8, at_least=1, at_most=MOST)

    def least_length(self) -> int:
        return 3 * self.pairs

    def least_vocab(self) -> int:
        return 2 * max(self.pairs, 2) + 1

    def carried(self, length: int, vocab: int) -> tuple[int, int, int]:
        return 2 * self.pairs, self.pairs, (vocab - 1) // 2

    def draw(self, of: BatchDraw) -> tuple[Tensor, Tensor]:
        half = (of.vocab - 1) // 2
        keys = of.distinct(self.pairs, 1, half + 1)
        values = of.uniform(self.pairs, half + 1, 2 * half + 1)
        asked = of.distinct(self.pairs, 0, self.pairs)
        at = of.ascending(self.pairs, 2 * self.pairs, of.length)
        tokens, labels = torch.full((of.rows, of.length), FILLER), of.unanswered()
        tokens[:, : 2 * self.pairs] = torch.stack([keys, values], -1).flatten(1)
        tokens.scatter_(1, at, keys.gather(1, asked))
        return tokens, labels.scatter_(1, at, values.gather(1, asked))


@register("induction")
class Induction(SyntheticTask):
    """Induction: the mark, token 0, stands at a uniform position before the last two and at the end, all other tokens are
    uniform in 1 … vocab − 1. The label of the last position is the token after the first mark. Chance is 1/(vocab − 1)."""

    def least_length(self) -> int:
        return 4

    def least_vocab(self) -> int:
        return 3

    def draw(self, of: BatchDraw) -> tuple[Tensor, Tensor]:
        tokens = of.uniform(of.length, 1, of.vocab)
        at = of.uniform(1, 0, of.length - 2)
        tokens.scatter_(1, at, MARK)
        tokens[:, -1] = MARK
        labels = of.unanswered()
        labels[:, -1:] = tokens.gather(1, at + 1)
        return tokens, labels


@register("selective_copy")
class SelectiveCopy(SyntheticTask):
    """Selective copying: `symbols` uniform tokens in 2 … vocab − 1 stand at uniform positions of the first length − symbols;
    all others there are the filler, token 0. The last `symbols` positions are the question, token 1, labeled with the symbols
    in their order. Chance is 1/(vocab − 2)."""

    symbols: int = bounded(4, at_least=1, at_most=MOST)

    def least_length(self) -> int:
        return 2 * self.symbols

    def least_vocab(self) -> int:
        return 4

    def draw(self, of: BatchDraw) -> tuple[Tensor, Tensor]:
        room = of.length - self.symbols
        values = of.uniform(self.symbols, 2, of.vocab)
        at = of.ascending(self.symbols, 0, room)
        tokens, labels = torch.full((of.rows, of.length), ASK), of.unanswered()
        tokens[:, :room] = torch.full((of.rows, room), FILLER).scatter(1, at, values)
        labels[:, room:] = values
        return tokens, labels
