"""Tasks of computation: the answer follows from all tokens before it by an algorithm.

    modular_sum    3 5 1 …     at each token: the sum so far, modulo m; 3 1 2 with m = 7
    parity         1 1 0 …     the same with m = 2: 1 0 0
    dyck           ( [ ] …     at each token: the bracket that closes the innermost open one; ) ] )
    sorting        4 2 4 | 2 4     from the separator on: the next item in ascending order; 2 4 4

A finite state suffices for the first two, a stack for the third, a count per item for the last (Hahn 2020; Merrill et al.
2024).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dovetail.data.tasks.recall import MOST
from dovetail.data.tasks.task import BatchDraw, SyntheticTask
from dovetail.nn.loss import IGNORED
from dovetail.spec.field import bounded
from dovetail.spec.part import register

SEPARATOR = 0  # of sorting


def running_sum(of: BatchDraw, modulus: int, every: bool) -> tuple[Tensor, Tensor]:
    """Uniform tokens below the modulus, and their sum so far: at every position, or at the last one."""
    tokens = of.uniform(of.length, 0, modulus)
    sums = tokens.cumsum(1) % modulus
    if every:
        return tokens, sums
    labels = of.unanswered()
    labels[:, -1] = sums[:, -1]
    return tokens, labels


@register("modular_sum")
class ModularSum(SyntheticTask):
    """Modular sums: tokens are uniform in 0 … modulus − 1; the label of a position is the sum of all tokens up to it, modulo
    `modulus`; with `every` false only the last position has one. Chance is 1/modulus."""

    modulus: int = bounded(7, at_least=2, at_most=MOST)
    every: bool = True

    def least_length(self) -> int:
        return 1

    def least_vocab(self) -> int:
        return self.modulus

    def draw(self, of: BatchDraw) -> tuple[Tensor, Tensor]:
        return running_sum(of, self.modulus, self.every)


@register("parity")
class Parity(SyntheticTask):
    """Parity: tokens are uniform bits; the label of a position is the parity of the bits up to it; with `every` false only the
    last position has one. Chance is 1/2."""

    every: bool = True

    def least_length(self) -> int:
        return 1

    def least_vocab(self) -> int:
        return 2

    def draw(self, of: BatchDraw) -> tuple[Tensor, Tensor]:
        return running_sum(of, 2, self.every)


@register("dyck")
class Dyck(SyntheticTask):
    """Dyck words: brackets of `types` types, nested up to `depth` deep. Tokens 0 … types − 1 open, types + i closes i.

    A row is a prefix of such a word: at each position a bracket opens or the innermost one closes, with probability ½ each
    where both may be; types are uniform. The label of a position with an open bracket is the token that closes the
    innermost. Chance is 1/types.
    """

    types: int = bounded(2, at_least=2, at_most=MOST)
    depth: int = bounded(4, at_least=1, at_most=1024)

    def least_length(self) -> int:
        return 2

    def least_vocab(self) -> int:
        return 2 * self.types

    def draw(self, of: BatchDraw) -> tuple[Tensor, Tensor]:
        coins, kinds = of.uniform(of.length, 0, 2).bool(), of.uniform(of.length, 0, self.types)
        tokens, labels = torch.empty_like(kinds), of.unanswered()
        stack, height = torch.zeros(of.rows, self.depth, dtype=torch.long), torch.zeros(of.rows, 1, dtype=torch.long)
        for i in range(of.length):
            kind = kinds[:, i : i + 1]
            opens = ((height == 0) | coins[:, i : i + 1]) & (height < self.depth)
            closed = stack.gather(1, (height - 1).clamp(0)) + self.types
            tokens[:, i : i + 1] = torch.where(opens, kind, closed)
            top = height.clamp(max=self.depth - 1)
            stack.scatter_(1, top, torch.where(opens, kind, stack.gather(1, top)))
            height += torch.where(opens, 1, -1)
            innermost = stack.gather(1, (height - 1).clamp(0)) + self.types
            labels[:, i : i + 1] = torch.where(height > 0, innermost, IGNORED)
        return tokens, labels


@register("sorting")
class Sorting(SyntheticTask):
    """Sorting: `items` uniform tokens in 1 … vocab − 1, the separator, token 0, and the items in ascending order, but for the
    last. The last `items` positions are labeled with the next item of that order. Further positions at the start of the
    row are separators."""

    items: int = bounded(8, at_least=1, at_most=MOST)

    def least_length(self) -> int:
        return 2 * self.items

    def least_vocab(self) -> int:
        return 3

    def draw(self, of: BatchDraw) -> tuple[Tensor, Tensor]:
        items = of.uniform(self.items, 1, of.vocab)
        ordered = items.sort(1).values
        separator = torch.full((of.rows, 1), SEPARATOR)
        before = separator.expand(-1, of.length - 2 * self.items)
        labels = of.unanswered()
        labels[:, -self.items :] = ordered
        return torch.cat([before, items, separator, ordered[:, :-1]], 1), labels
