"""Tasks of long context, of the kinds of RULER (Hsieh et al. 2024): what the answer needs stands among noise, at a depth.

    needle               · · k v · · · · · k               the value of the key
    multi_key            · k₂ v₂ · k₁ v₁ · k₃ v₃ · k₁      the same among other pairs
    multi_hop            · k₂ v · · j₁ j₂ · k₁ k₂ · k₁     the value at the end of a chain of keys
    variable_tracking    · x₁ v · · x₂ x₁ · · x₃ x₂ · v x₁ x₂      every variable with the value, in order
    aggregation          a b a c a b … !                   the token that occurs most often
    far_copy             · ! a b c · · · · · ! a b         the tokens after the earlier mark

With m = ⌊(vocab − 1) / 3⌋: token 0 is the mark, 1 … m are keys, m + 1 … 2m values, the others noise, uniform. Noise is never a
key, a value or the mark: it cannot overwrite what is asked for. `depth` is where the tokens to be found stand: 0 at the start
of the row, 1 at its end, just before the question; without it, anywhere.
"""

from __future__ import annotations

import dataclasses as dc
from typing import NamedTuple

import torch
from torch import Tensor

from dovetail.data.tasks.recall import MARK, MOST
from dovetail.data.tasks.task import BatchDraw, SyntheticTask
from dovetail.spec.field import bounded
from dovetail.spec.part import register


class Ranges(NamedTuple):
    """The first key, the first value, the first token of noise, and the size of the vocabulary."""

    keys: int
    values: int
    noise: int
    end: int

    @staticmethod
    def of(vocab: int) -> Ranges:
        """The ranges of a vocabulary."""
        third = (vocab - 1) // 3
        return Ranges(1, 1 + third, 1 + 2 * third, vocab)


@dc.dataclass(frozen=True, kw_only=True, repr=False)
class AtDepth(SyntheticTask):
    """A task whose answer stands at a depth of the row."""

    depth: float | None = bounded(None, at_least=0, at_most=1)

    def slots(self, of: BatchDraw, count: int, total: int) -> Tensor:
        """(rows, count) distinct slots of `total`: the first at the depth, or anywhere without one; the others anywhere."""
        scores = torch.rand(of.rows, total, generator=of.random)
        if self.depth is not None:
            scores[:, round(self.depth * (total - 1))] = -1.0
        return scores.argsort(1)[:, :count]


def noise(of: BatchDraw, tail: Tensor) -> Tensor:
    """Rows of noise that end with the question (rows, k)."""
    tokens = of.uniform(of.length, Ranges.of(of.vocab).noise, of.vocab)
    tokens[:, -tail.shape[1] :] = tail
    return tokens


def put_pairs(tokens: Tensor, slots: Tensor, first: Tensor, second: Tensor) -> None:
    """Write pairs of tokens (rows, count) into slots (rows, count) of two positions each."""
    tokens.scatter_(1, 2 * slots, first)
    tokens.scatter_(1, 2 * slots + 1, second)


def look_up(task: AtDepth, of: BatchDraw, chains: int, hops: int) -> tuple[Tensor, Tensor]:
    """Chains of `hops` pairs each, of which the first is asked for; the pair with its value is at the depth."""
    ranges = Ranges.of(of.vocab)
    keys = of.distinct(chains * hops, ranges.keys, ranges.values).unflatten(1, (chains, hops))
    values = of.uniform(chains, ranges.values, ranges.noise)
    tokens = noise(of, keys[:, 0, :1])
    follows = torch.cat([keys[:, :, 1:], values[:, :, None]], 2)  # of k₁ … k_hops: k₂ … k_hops, v
    slots = task.slots(of, chains * hops, (of.length - 1) // 2)
    put_pairs(tokens, slots, keys.flip(2).flatten(1), follows.flip(2).flatten(1))  # the last pair of the first chain first
    labels = of.unanswered()
    labels[:, -1] = values[:, 0]
    return tokens, labels


@register("needle")
class Needle(AtDepth):
    """A needle in a haystack: a key and its value stand in noise; the last token is the key again, labeled with the value.
    Chance is 1/m."""

    def least_length(self) -> int:
        return 3

    def least_vocab(self) -> int:
        return 7

    def draw(self, of: BatchDraw) -> tuple[Tensor, Tensor]:
        return look_up(self, of, 1, 1)

    def carried(self, length: int, vocab: int) -> tuple[int, int, int]:
        return length - 1, 1, (vocab - 1) // 3


@register("multi_key")
class MultiKey(AtDepth):
    """A needle among needles: `pairs` distinct keys with their values stand in noise; the last token is one of the keys,
    labeled with its value. The pair that is asked for is at the depth, the others anywhere. Values are uniform. Chance is
    1/m."""

    pairs: int = bounded(8, at_least=1, at_most=MOST)

    def least_length(self) -> int:
        return 2 * self.pairs + 1

    def least_vocab(self) -> int:
        return 3 * max(self.pairs, 2) + 1

    def draw(self, of: BatchDraw) -> tuple[Tensor, Tensor]:
        return look_up(self, of, self.pairs, 1)


@register("multi_hop")
class MultiHop(AtDepth):
    """Multi-hop look-up: `chains` chains k₁ → k₂ → … → value of `hops` pairs each stand in noise, in any order; the last token
    is the first key of one chain, labeled with its value, which is at the depth. All keys are distinct. Chance is 1/m, or
    1/chains for a model that only knows which values stand in the row."""

    hops: int = bounded(2, at_least=1, at_most=MOST)
    chains: int = bounded(4, at_least=1, at_most=MOST)

    def least_length(self) -> int:
        return 2 * self.hops * self.chains + 1

    def least_vocab(self) -> int:
        return 3 * max(self.hops * self.chains, 2) + 1

    def draw(self, of: BatchDraw) -> tuple[Tensor, Tensor]:
        return look_up(self, of, self.chains, self.hops)


@register("variable_tracking")
class VariableTracking(SyntheticTask):
    """Variable tracking: `chains` chains of assignments x₁ = v, x₂ = x₁, x₃ = x₂ …, `hops` each, stand in noise as the pairs x₁
    v, x₂ x₁ …, in the order of each chain. The row ends with one of the values and with the variables that have it, but for the
    last; these last `hops` positions are labeled with the next variable. Variables are keys; the values are distinct."""

    hops: int = bounded(3, at_least=1, at_most=MOST)
    chains: int = bounded(2, at_least=1, at_most=MOST)

    def least_length(self) -> int:
        return 2 * self.hops * self.chains + self.hops

    def least_vocab(self) -> int:
        return 3 * max(self.hops * self.chains, 2) + 1

    def draw(self, of: BatchDraw) -> tuple[Tensor, Tensor]:
        ranges, count = Ranges.of(of.vocab), self.chains * self.hops
        names = of.distinct(count, ranges.keys, ranges.values).unflatten(1, (self.chains, self.hops))
        values = of.distinct(self.chains, ranges.values, ranges.noise)
        sources = torch.cat([values[:, :, None], names[:, :, :-1]], 2)
        slots = of.distinct(count, 0, (of.length - self.hops) // 2).unflatten(1, (self.chains, self.hops)).sort(2).values
        tokens, labels = noise(of, sources[:, 0]), of.unanswered()
        put_pairs(tokens, slots.flatten(1), names.flatten(1), sources.flatten(1))
        labels[:, -self.hops :] = names[:, 0]
        return tokens, labels


@register("aggregation")
class Aggregation(SyntheticTask):
    """Aggregation: `words` distinct keys fill the row in random order, one of them about twice as often as each of the others,
    which occur equally often: ⌊(length − 1) / (words + 1)⌋ times. The last token is the mark, labeled with the most frequent.
    Chance is 1/words."""

    words: int = bounded(8, at_least=2, at_most=MOST)

    def least_length(self) -> int:
        return self.words + 2

    def least_vocab(self) -> int:
        return 3 * self.words + 1

    def draw(self, of: BatchDraw) -> tuple[Tensor, Tensor]:
        ranges, room = Ranges.of(of.vocab), of.length - 1
        words = of.distinct(self.words, ranges.keys, ranges.values)
        others = torch.arange(1, self.words).repeat(room // (self.words + 1))
        which = torch.cat([torch.zeros(room - len(others), dtype=torch.long), others])
        order = of.distinct(room, 0, room)
        tokens, labels = torch.full((of.rows, of.length), MARK), of.unanswered()
        tokens[:, :room] = words[:, which].gather(1, order)
        labels[:, -1] = words[:, 0]
        return tokens, labels


@register("far_copy")
class FarCopy(AtDepth):
    """Far copying: the mark and `span` uniform values stand in noise; the row ends with the mark and the same values, but for
    the last. These last `span` positions are labeled with the next value. Chance is 1/m."""

    span: int = bounded(8, at_least=1, at_most=MOST)

    def least_length(self) -> int:
        return 2 * self.span + 1

    def least_vocab(self) -> int:
        return 7

    def draw(self, of: BatchDraw) -> tuple[Tensor, Tensor]:
        ranges = Ranges.of(of.vocab)
        values = of.uniform(self.span, ranges.values, ranges.noise)
        marked = torch.cat([torch.full((of.rows, 1), MARK), values], 1)
        tokens, labels = noise(of, marked[:, :-1]), of.unanswered()
        start = self.slots(of, 1, of.length - 2 * self.span)
        tokens.scatter_(1, start + torch.arange(self.span + 1), marked)
        labels[:, -self.span :] = values
        return tokens, labels

    def carried(self, length: int, vocab: int) -> tuple[int, int, int]:
        return length - self.span, self.span, (vocab - 1) // 3
