"""Lookahead drafts: the engine's tokens are those of a run alone, and each guess is what the model says behind the drafts that
were rejected."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from speculated import ATTENTION, MAMBA, alone, learned, prompt, run
from torch import Tensor

from dovetail.decoding.sampling import Sampling
from dovetail.model.model import ModelModule
from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout
from dovetail.serving.engine import Engine
from dovetail.serving.lookahead import Lookahead, Row
from dovetail.serving.request import Request
from dovetail.serving.schedule import Continuation
from dovetail.serving.speculate import sample_drafts

MODELS = {"attention": (ATTENTION, ATTENTION), "hybrid": (MAMBA, ATTENTION)}


class Compared(Lookahead):
    """Compares the guesses with those of a whole pass over all tokens and the drafts behind them."""

    compared = 0

    def __init__(self, model: ModelModule) -> None:
        super().__init__(model)
        self.fed: dict[Continuation, list[int]] = {}  # what was read up to the last state that is kept

    def observe(self, one: Continuation, first: int, hidden: Tensor) -> None:
        before = self._row(one).hidden
        super().observe(one, first, hidden)
        if self._row(one).hidden is not before:
            self.fed[one] = [*one.tokens, *one.drafts][: first + len(hidden)]

    def _guesses(self, ones: Sequence[Continuation]) -> list[list[int]]:
        guesses = super()._guesses(ones)
        for one, got in zip(ones, guesses, strict=True):
            fed = self.fed.get(one, [])
            if len(fed) >= len(one.tokens):
                assert got == self.whole(one, fed), (one.request.id, len(one.tokens))
                self.compared += len(got)
        return guesses

    def whole(self, one: Continuation, fed: list[int]) -> list[int]:
        """The guesses, by a pass over what the last step had read."""
        ctx = Ctx(layout=TokenLayout.whole(1, len(fed)))
        logits = self.model.head(*self.model.hidden(torch.tensor([fed]), ctx))[0, len(one.tokens) - 1 :]
        guesses = list[int]()
        for row in logits:
            guesses += sample_drafts(row[None], [one], [guesses])
        return guesses


def busy(drafter: Lookahead, name: str, temperature: float) -> Engine:
    """An engine whose requests join, fork and are preempted, compared with each request alone."""
    model = learned(MODELS[name], ())
    engine = Engine(model, rows=3, longest=90, budget=40, page=4, pages=30, share=False, drafter=drafter)
    requests = [
        Request(
            id=str(i),
            prompt=prompt(7 * i, (1, 3, 20, 41, 9)[i]),
            max_tokens=30 - i,
            sampling=Sampling(temperature=temperature, top_k=20, seed=10 * i),
            n=1 + i % 2,
        )
        for i in range(5)
    ]
    got = run(engine, *requests)
    for request in requests:
        for index in range(request.n):
            assert got[request.id, index] == alone(model, request, index), request
    return engine


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_without_drafts_and_guesses_those_of_the_model(name: str, temperature: float) -> None:
    drafter = Compared(learned(MODELS[name], ()))
    stats = busy(drafter, name, temperature).stats()
    assert drafter.compared > 20
    assert stats.accepted > 0


def test_a_guess_of_another_token_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted bug: the states behind the draft after the one that was rejected. Tokens stay; the guesses are wrong."""
    rejected = Row.rejected
    monkeypatch.setattr(Row, "rejected", lambda row, known: rejected(row, known + 1))
    with pytest.raises(AssertionError):
        busy(Compared(learned(MODELS["attention"], ())), "attention", 0.0)
    busy(Lookahead(learned(MODELS["attention"], ())), "attention", 0.0)


def test_n_grams_are_diagonals_of_the_iterations() -> None:
    row = Row(Continuation(Request(id="a", prompt=(1,), max_tokens=1), 0, (0, 0), [1], 1))
    row.learn({5: 10, 6: 11, 7: 12})
    row.learn({6: 21, 7: 22, 8: 23})
    assert not row.grams
    row.learn({7: 32, 8: 33, 9: 34})
    assert dict(row.grams) == {10: [21, 32], 11: [22, 33], 12: [23, 34]}
    assert row.follow(10, 4, [7, 8, 9, 6]) == [21, 32, 9, 6]
    row.learn({8: 10, 9: 41})
    assert row.grams[22] == [33, 41]
    assert row.grams[21] == [32, 10]
    assert row.follow(21, 5, [1, 2, 3, 4, 5]) == [32, 10, 21, 32, 5]
