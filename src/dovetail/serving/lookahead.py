"""Lookahead drafts: n-grams from the model's own guesses at tokens that are not known yet (Jacobi iterations).

    a step computes the last token and k drafts; its logits behind draft i guess token i + 1, also behind a wrong draft

    iteration 1     …  a   b   c   d           a diagonal is an n-gram that the model wrote itself: (b, c, d') was guessed in
    iteration 2     …      b'  c'  d'          three iterations, each token behind the one before it. Drafts are the n-grams
    iteration 3     …          c'' d''         that begin with the last token, and behind them the newest guesses

Nothing but the head runs more than once: no second model, no trained head, no text to search. The window of Fu et al. runs
beside the drafts in the same step, under a mask of its own; here the drafts of a step are its window, so that the number of
drafts is that of the window, and one n-gram is checked at a time.

Guesses are sampled with the uniform numbers of the tokens they guess (speculate.py): a guess behind right tokens is the token.
Fu et al. 2024 (Lookahead decoding); Santilli et al. 2023 (Jacobi decoding)
"""

from __future__ import annotations

import dataclasses as dc
from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from dovetail.model.model import ModelModule
from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout
from dovetail.serving.adapters import Adapters
from dovetail.serving.schedule import Continuation
from dovetail.serving.speculate import Drafter, sample_drafts

N = 3  # tokens of an n-gram: the first is looked up
MOST = 65  # tokens of a step of one continuation: the last and its drafts
GRAMS = 4096  # n-grams of a row: the newest


@dc.dataclass
class Row:
    """The iterations of one continuation, and the n-grams that they gave."""

    owner: Continuation
    known: int = 0  # tokens of the continuation in the last iteration
    first: int = 0  # the number of the first token of the last step
    hidden: Tensor | None = None  # (n, embed) of its tokens
    windows: list[dict[int, int]] = dc.field(default_factory=list)  # the last N − 1 iterations: number of a token -> its guess
    grams: OrderedDict[int, list[int]] = dc.field(default_factory=OrderedDict)  # a token -> what followed it last

    def learn(self, window: dict[int, int]) -> None:
        """Add an iteration, and the n-grams that end in it."""
        before = self.windows[1 - N :]
        for number, token in window.items():
            gram = [old.get(number - len(before) + i) for i, old in enumerate(before)]
            known = [one for one in gram if one is not None]
            if len(known) == N - 1:
                self.grams.pop(known[0], None)
                self.grams[known[0]] = [*known[1:], token]
                if len(self.grams) > GRAMS:
                    self.grams.popitem(last=False)
        self.windows = [*self.windows, window][1 - N :]

    def rejected(self, known: int) -> Tensor:
        """The hidden states (n, embed) of the last step from token number known − 1 on, where a draft was rejected."""
        if self.hidden is None:
            return torch.zeros(0, 0)
        begin = known - 1 - self.first
        return self.hidden[begin:] if 0 <= begin <= len(self.hidden) else self.hidden[:0]

    def follow(self, token: int, count: int, guesses: Sequence[int]) -> list[int]:
        """Up to `count` tokens behind a token: n-grams, one behind the other; where none begins with the last, the guesses."""
        drafts = list[int]()
        while len(drafts) < count and (gram := self.grams.get([token, *drafts][-1])) is not None:
            drafts += gram
        return [*drafts, *guesses[len(drafts) :]][:count]


class Lookahead(Drafter):
    """Drafts from the model's guesses at tokens further on."""

    def __init__(self, model: ModelModule) -> None:
        self.model, self.adapters = model, Adapters(model)
        self.rows: dict[int, Row] = {}

    def attach(self, adapters: Adapters) -> None:
        self.adapters = adapters

    @torch.inference_mode()
    def observe(self, one: Continuation, first: int, hidden: Tensor) -> None:
        row = self._row(one)
        begin = max(len(hidden) - MOST, 0)  # of a chunk of a prompt nothing is needed
        again = row.hidden is not None and not one.drafts and first + len(hidden) <= row.first + len(row.hidden)
        if not again:  # a recurrent state is back at its mark: the guesses behind the drafts of the step before stay
            row.first, row.hidden = first + begin, hidden[begin:].clone()

    def fork(self, one: Continuation, other: Continuation) -> None:
        row = self._row(one)
        self.rows[other.held_row] = dc.replace(row, owner=other, windows=list(row.windows), grams=row.grams.copy())

    def reset(self) -> None:
        self.rows.clear()

    @torch.inference_mode()
    def draft(self, ones: Sequence[Continuation], counts: Sequence[int]) -> list[list[int]]:
        drafts = list[list[int]]()
        for one, count, guesses in zip(ones, counts, self._guesses(ones), strict=True):
            row, known = self._row(one), len(one.tokens)
            if row.known == known:  # it got no place in the last step
                drafts.append(one.drafts[:count])
                continue
            sampled = {i: one.tokens[i] for i in range(row.known or known - 1, known)}
            row.learn({**sampled, **{known + i: token for i, token in enumerate(guesses)}})
            row.known = known
            # without a guess any token begins the iteration: those before
            filled = [*guesses, *(one.tokens[-1 - i % known] for i in range(max(count - len(guesses), 0)))]
            drafts.append(row.follow(one.tokens[-1], count, filled))
        return drafts

    def _row(self, one: Continuation) -> Row:
        row = self.rows.get(one.held_row)
        if row is None or row.owner is not one:
            row = self.rows[one.held_row] = Row(one)
        return row

    def _guesses(self, ones: Sequence[Continuation]) -> list[list[int]]:
        """The guesses at the tokens behind the last, from the hidden states at drafts that were rejected."""
        states = list[Tensor]()
        for one in ones:
            row = self._row(one)
            states.append(row.rejected(len(one.tokens)))
        guesses: list[list[int]] = [[] for _ in ones]
        counts = [len(state) for state in states]
        if not sum(counts):
            return guesses
        x = torch.cat([state for state in states if len(state)])[:, None]
        ctx = Ctx(layout=TokenLayout.whole(len(x), 1, device=x.device), ranks=self.model.ranks)
        slots = [one.request.adapter for one, n in zip(ones, counts, strict=True) for _ in range(n)]
        with self.adapters.rows(slots):
            logits = list(self.model.head(x, ctx)[:, 0].split(counts))
        for i in range(max(counts)):
            asked = [j for j, n in enumerate(counts) if i < n]
            rows = torch.stack([logits[j][i] for j in asked])
            sampled = sample_drafts(rows, [ones[j] for j in asked], [guesses[j] for j in asked])
            for j, token in zip(asked, sampled, strict=True):
                guesses[j].append(token)
        return guesses
