"""Models that draft for themselves, and what both tests of such drafts need: requests, a run alone, drafts of a whole pass."""

from __future__ import annotations

import dataclasses as dc
import math
import random
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

import dovetail as dt
from dovetail.decoding.generation import generate_tokens
from dovetail.decoding.sampling import Sampling
from dovetail.model.transformer import Transformer
from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout
from dovetail.serving.draft_ahead import Depths, own_drafter
from dovetail.serving.engine import Engine
from dovetail.serving.request import Output, Request
from dovetail.serving.schedule import Continuation
from dovetail.serving.speculate import sample_drafts

TEXT = "It was the best of times, it was the worst of times. "
ATTENTION = "{mixer: {heads: 2, head: 16}, ffn: {hidden: 64}}"
MAMBA = "{mixer: {kind: mamba2, inner: 64, head: 16, state_size: 16}, ffn: {hidden: 64}}"
EXPERTS = "{mixer: {heads: 2, head: 16}, ffn: {kind: moe, experts: 4, hidden: 32}}"
SURE = 0.001  # of a chi-square test: with fixed seeds it fails always or never
TEMPERATURE, CHOICES, SEED = 1.3, 8, 1_000_000


@cache
def learned(layers: tuple[str, ...], depths: tuple[str, ...], steps: int = 50, rate: float = 1e-2) -> Transformer:
    """A model of bytes that has learned the text, in float64: batches round as single rows do."""
    spec = dt.from_yaml(f"{{width: 32, vocab: 128, layers: [{', '.join(layers)}], mtp: [{', '.join(depths)}]}}")
    model = dt.build(spec, seed=1).train()
    windows = torch.tensor(list(TEXT.encode() * 3)).unfold(0, 40, 17)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    for _ in range(steps):
        model.loss(windows).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval().double()


def prompt(begin: int, n: int) -> tuple[int, ...]:
    """Tokens of the text."""
    return tuple((TEXT.encode() * 3)[begin : begin + n])


def alone(model: Transformer, request: Request, index: int = 0) -> list[int]:
    """The tokens of a request without an engine."""
    sampling = dc.replace(request.sampling, seed=request.sampling.seed + index)
    return list(generate_tokens(model, torch.tensor(request.prompt), request.max_tokens, sampling))


def joined(outputs: list[Output]) -> dict[tuple[str, int], list[int]]:
    """All tokens by request and index."""
    tokens: dict[tuple[str, int], list[int]] = {}
    for output in outputs:
        tokens.setdefault((output.id, output.index), []).extend(output.tokens)
    return tokens


def run(engine: Engine, *requests: Request) -> dict[tuple[str, int], list[int]]:
    """The tokens of some requests, by an engine."""
    for request in requests:
        engine.add(request)
    return joined([output for _ in iter(lambda: engine.busy, False) for output in engine.step()])


class Compared(Depths):
    """Compares each draft with that of a whole pass; the class behind it in the order of bases drafts."""

    compared = 0

    def draft(self, ones: Sequence[Continuation], counts: Sequence[int]) -> list[list[int]]:
        drafts = super().draft(ones, counts)
        for one, count, got in zip(ones, counts, drafts, strict=True):
            assert got == self.whole(one, min(count, self.drafts)), (one.request.id, len(one.tokens))
            self.compared += len(got)
        return drafts

    @torch.inference_mode()
    def whole(self, one: Continuation, count: int) -> list[int]:
        """The drafts behind all tokens of a continuation, without a decode state."""
        drafts: list[int] = []
        ctx = Ctx(layout=TokenLayout.whole(1, len(one.tokens) - 1))
        before = hidden = self.model.hidden(torch.tensor([one.tokens[:-1]]), ctx)[0]
        for depth in range(1, count + 1):
            ahead = torch.tensor([[*one.tokens, *drafts][1 if self.recurs else depth :]])
            logits, before = self.model.draft(hidden, ahead, ctx, 1 if self.recurs else depth, before)
            drafts += sample_drafts(logits[:, -1], [one], [drafts])
            if self.recurs:  # its own hidden state is the next one
                before = hidden = torch.cat([hidden, before[:, -1:]], 1)
                ctx = Ctx(layout=TokenLayout.whole(1, hidden.shape[1]))
        return drafts


def compare_distribution(model: Transformer) -> None:
    """Chi-square of third tokens, which are sampled behind a draft of the second where that is accepted, against the model's
    own probs, summed over the first two. The model has learned little, so that several tokens are likely."""
    start, draws = prompt(11, 20), 800
    sampling = Sampling(temperature=TEMPERATURE, top_k=CHOICES)
    requests = [
        Request(id=str(i), prompt=start, max_tokens=3, sampling=dc.replace(sampling, seed=SEED + i)) for i in range(draws)
    ]
    engine = Engine(model, rows=8, longest=64, drafter=own_drafter(model, rows=8, longest=64, drafts=2), drafts=2)
    got, probs = run(engine, *requests), third(model, start)
    assert engine.stats().accepted > draws / 20
    counts = torch.zeros_like(probs)
    for tokens in got.values():
        counts[tokens[2]] += 1
    likely = probs * draws >= 5  # the others are one cell
    seen, expected = (torch.cat([x[likely], x[~likely].sum()[None]]) for x in (counts, probs * draws))
    assert len(seen) > 3
    statistic = ((seen - expected) ** 2 / expected.clamp_min(1e-12)).sum()
    freedom = torch.tensor((len(seen) - 1) / 2, dtype=torch.float64)
    assert torch.special.gammaincc(freedom, statistic / 2) > SURE


@torch.inference_mode()
def third(model: Transformer, start: tuple[int, ...]) -> Tensor:
    """The probs (vocab,) of the third token behind a prompt."""
    texts, weights = torch.tensor([start]), torch.ones(1, dtype=torch.float64)
    for _ in range(2):
        probs = weights[:, None] * top(model(texts)[:, -1])
        rows, tokens = probs.nonzero(as_tuple=True)
        texts, weights = torch.cat([texts[rows], tokens[:, None]], 1), probs[rows, tokens]
    return (weights[:, None] * top(model(texts)[:, -1])).sum(0)


def top(logits: Tensor) -> Tensor:
    """The probs (…, vocab) that the requests sample from."""
    logits = logits.double() / TEMPERATURE
    least = logits.topk(CHOICES).values[..., -1:]
    return logits.masked_fill(logits < least, -math.inf).softmax(-1)


def run_busy(model: Transformer, drafter: Compared, temperature: float) -> None:
    """Compare the tokens of requests that join, fork, are aborted and preempted with those of each alone."""
    rng = random.Random(5)
    engine = Engine(model, rows=4, longest=90, budget=40, page=4, pages=20, share=False, drafter=drafter)
    sampling = Sampling(temperature=temperature, top_k=20)
    requests = [
        Request(
            id=str(i),
            prompt=prompt(rng.randrange(50), rng.choice([1, 2, 3, 9, 21, 50])),
            max_tokens=rng.randrange(1, 30),
            sampling=dc.replace(sampling, seed=10 * i),
            n=rng.choice([1, 1, 2]),
        )
        for i in range(12)
    ]
    todo, outputs, aborted = list(requests), list[Output](), set[str]()
    while todo or engine.busy:
        if todo and rng.random() < 0.8:  # requests join while others decode
            engine.add(todo.pop())
        if engine.requests and rng.random() < 0.03:
            aborted.add(gone := rng.choice(list(engine.requests)))
            outputs += engine.abort(gone)
        outputs += engine.step()
    got = joined(outputs)
    for request in requests:
        for index in range(request.n):
            want, found = alone(model, request, index), got.get((request.id, index), [])
            assert found == (want[: len(found)] if request.id in aborted else want), request
    stats = engine.stats()
    assert stats.preemptions > 0
    assert drafter.compared >= stats.drafted > 50
