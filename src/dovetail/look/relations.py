"""Relations between tokens, and the attention that a head gives to them.

    mass(R) = Σ_{(b, q, k) ∈ R} P[b, h, q, k] / |{(b, q) in R}|                     P (rows, heads, n, n)  ->  (heads,)

    previous-token   k = q − 1           next-token   k = q + 1            of a model that sees later tokens
    first-token      k = 0               last-token   k = n − 1            likewise
    duplicate-token  t_k = t_q, k ≠ q    induction    t_{k−1} = t_q                      Olsson et al. 2022
    a name of yours  pairs of a query and a key: verb and subject, pronoun and name     Clark et al. 2019

Each has a null distribution: the same attention, and the relation of a shuffled text. The keys of each query are shuffled
(previous, next); another token takes the place of the first (first, last); the text repeats after another number of tokens
(duplicate, induction); each pair has the distance of another pair, so that a head of one distance explains no syntax.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from dovetail.base.errors import InputError

Span = tuple[int, int, int | range]  # row, token of the query, token or tokens of the key
Spans = Mapping[str, Sequence[Span]]
FEWEST = 4  # visible keys of a query that counts: among fewer, any head gives much to each
ROWS = 8  # of the repeated text, at least
PAIRS = 8  # of a relation of spans, at least: the distances of fewer are hardly shuffled


class Relation(NamedTuple):
    """Pairs of a query and a key."""

    triples: Tensor  # (m, 3): row, query, key
    queries: int

    @classmethod
    def of(cls, triples: Tensor) -> Relation:
        """The pairs of these rows, queries and keys."""
        return cls(triples, max(len(torch.unique(triples[:, 0] * (1 << 32) + triples[:, 1])), 1))

    def mass(self, pattern: Tensor) -> Tensor:
        """The probability that each head gives to the keys of a query, the mean over queries."""
        row, query, key = self.triples.unbind(-1)
        return pattern[row, :, query, key].sum(0) / self.queries


class HeadTrait(NamedTuple):
    """A relation and what it is in a shuffled text; `repeated`: in the repeated text, instead of the text."""

    relation: Relation
    null: Callable[[Generator], Relation]
    repeated: bool = False


def repeated(tokens: Tensor, seed: int = 0) -> Tensor:
    """Return (8 rows or more, n): the tokens of each row shuffled, repeated after a quarter to half of the row, as induction
    heads need it. Tokens that all rows have at one place ([CLS], <s>) stay there."""
    return _repeated(tokens, Generator().manual_seed(seed))[0]


def _repeated(tokens: Tensor, generator: Generator, avoid: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The repeated text, and after how many tokens each row repeats: another number than `avoid` (rows,)."""
    copies = math.ceil(ROWS / len(tokens))
    out = tokens.cpu().repeat(copies, 1)
    where = free_positions(tokens)
    size, periods = len(where), torch.zeros(len(out), dtype=torch.long)
    for i, row in enumerate(out):
        low, high = size // 4, size // 2 + (avoid is None)
        period = int(torch.randint(low, high, (), generator=generator))
        period += avoid is not None and period >= int(avoid[i])
        periods[i], some = period, row[where][torch.randperm(size, generator=generator)[:period]]
        row[where] = some.repeat(size // period + 1)[:size]
    return out, periods


def free_positions(tokens: Tensor) -> Tensor:
    """The positions that may be shuffled: those at which the rows differ."""
    free = (tokens != tokens[:1]).any(0) if len(tokens) > 1 else torch.ones(tokens.shape[1], dtype=torch.bool)
    where = free.cpu().nonzero()[:, 0]
    if len(where) < 4 * FEWEST:
        raise InputError(f"tokens: rows differ at {len(where)} positions; give rows of at least {4 * FEWEST} other tokens")
    return where


def shuffled(tokens: Tensor, seed: int) -> Tensor:
    """The tokens of each row in another order."""
    out, where, generator = tokens.cpu().clone(), free_positions(tokens), Generator().manual_seed(seed)
    for row in out:
        row[where] = row[where[torch.randperm(len(where), generator=generator)]]
    return out


def head_traits(tokens: Tensor, causal: bool, spans: Spans, seed: int) -> tuple[Tensor, dict[str, HeadTrait]]:
    """The repeated text, and every relation by its name."""
    rows, n = tokens.shape
    row, query = torch.cartesian_prod(torch.arange(rows), torch.arange(FEWEST - 1, n - 1)).unbind(-1)

    def to(key: Tensor, where: Tensor | slice = slice(None)) -> Relation:
        return Relation.of(torch.stack([row, query, key], -1)[where])

    def keys_shuffled(true: Tensor) -> Callable[[Generator], Relation]:
        def null(generator: Generator) -> Relation:
            drawn = (torch.rand(len(row), generator=generator) * (query if causal else n - 1)).long()
            return to(drawn + (drawn >= true))

        return null

    def other_place(generator: Generator) -> Relation:
        place = torch.randint(1, n - 1 - FEWEST, (rows,), generator=generator)[row]
        return to(place, query >= place + FEWEST - 1 if causal else query != place)

    traits = {
        "previous-token": HeadTrait(to(query - 1), keys_shuffled(query - 1)),
        "first-token": HeadTrait(to(torch.zeros_like(query)), other_place),
    }
    if not causal:
        traits["next-token"] = HeadTrait(to(query + 1), keys_shuffled(query + 1))
        traits["last-token"] = HeadTrait(to(torch.full_like(query, n - 1)), other_place)
    generator = Generator().manual_seed(seed)
    again, periods = _repeated(tokens, generator)

    def of_repeated(relation: Callable[[Tensor], Relation]) -> HeadTrait:
        return HeadTrait(relation(again), lambda gen: relation(_repeated(tokens, gen, periods)[0]), repeated=True)

    traits["duplicate-token"] = of_repeated(lambda ids: _same(ids, ids, causal))
    if causal:
        traits["induction"] = of_repeated(lambda ids: _same(ids, ids.roll(1, -1), causal))
    for name, pairs in spans.items():
        traits[name] = _of_spans(name, pairs, tokens, causal)
    return again, traits


def _same(queries: Tensor, keys: Tensor, causal: bool) -> Relation:
    """Queries with the token of a key, which is another position; position 0 has none before it."""
    same = queries[:, :, None] == keys[:, None, :]
    same &= ~torch.eye(queries.shape[1], dtype=torch.bool)
    same[:, :, 0] = False
    return Relation.of((same.tril() if causal else same).nonzero())


def _of_spans(name: str, pairs: Sequence[Span], tokens: Tensor, causal: bool) -> HeadTrait:
    """The pairs that a text was annotated with."""
    rows, n = tokens.shape
    if len(pairs) < PAIRS:
        raise InputError(f"spans {name}: {len(pairs)} pairs; give at least {PAIRS}, so that their distances can be shuffled")
    spread = [(row, query, key if isinstance(key, range) else range(key, key + 1)) for row, query, key in pairs]
    for row, query, key in spread:
        if not (0 <= row < rows and 0 <= query < n and key and key[0] >= 0 and key[-1] < n):
            raise InputError(f"spans {name}: ({row}, {query}, {key}) is outside of the {rows} rows of {n} tokens")
        if causal and key[-1] > query:
            raise InputError(f"spans {name}: ({row}, {query}, {key}): this model sees no later tokens; swap query and key")

    def null(generator: Generator) -> Relation:
        order, triples = torch.randperm(len(spread), generator=generator).tolist(), list[tuple[int, int, int]]()
        for (row, query, key), other in zip(spread, order, strict=True):
            shift = spread[other][2][0] - spread[other][1]
            top = (query if causal else n - 1) - len(key) + 1
            start = min(max(query + shift, 0), max(top, 0))
            triples += [(row, query, k) for k in range(start, start + len(key))]
        return Relation.of(torch.tensor(triples))

    return HeadTrait(Relation.of(torch.tensor([(row, query, k) for row, query, key in spread for k in key])), null)
