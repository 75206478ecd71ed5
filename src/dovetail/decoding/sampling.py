"""Sampling: the next token of each row from its logits.

    z ← penalties and biases of z                         by the tokens of the prompt and those generated so far
    p = softmax(z / temperature)                          temperature 0 takes the most probable token
    kept: min_p (tokens at least min_p times as probable as the most probable one), then top_k (the k most probable), then
    top_p (the fewest of these whose probs sum to top_p)
    token = the first whose cumulative prob exceeds u · Σ kept        u is a function of (seed, number of the token) alone

The tokens of a row depend neither on its neighbors in the batch nor on how often its request was interrupted: the uniform
numbers have no state. Holtzman et al. 2020 (top-p); Nguyen et al. 2024 (min-p); Keskar et al. 2019 (repetition penalty).
"""

from __future__ import annotations

import dataclasses as dc
from collections import Counter
from collections.abc import Mapping, Sequence
from math import isfinite

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dovetail.base.errors import SpecError
from dovetail.base.limits import MAX_SEED
from dovetail.nn.random import draw, path_hash

STREAM = path_hash("sampling")
TOP_P_CANDIDATES = 512  # tokens that mostly hold top_p of the probability: sorted first, before all are


@dc.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is sampled."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0  # divides positive logits of tokens in the prompt or generated, multiplies negative ones
    presence_penalty: float = 0.0  # subtracted once from the logit of a generated token
    frequency_penalty: float = 0.0  # subtracted for each time that it was generated
    logit_bias: Mapping[int, float] = dc.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise SpecError("temperature", f"{self.temperature} is not 0 or more")
        if self.top_k is not None and self.top_k < 1:
            raise SpecError("top_k", f"{self.top_k} is not 1 or more")
        if not 0 < self.top_p <= 1:
            raise SpecError("top_p", f"{self.top_p} is not above 0 and at most 1")
        if not 0 <= self.min_p <= 1:
            raise SpecError("min_p", f"{self.min_p} is not from 0 to 1")
        if not -MAX_SEED <= self.seed <= MAX_SEED:
            raise SpecError("seed", f"{self.seed} is not a whole number of 64 bits")
        if not 0 < self.repetition_penalty < float("inf"):
            raise SpecError("repetition_penalty", f"{self.repetition_penalty} is not above 0")
        for name in ("presence_penalty", "frequency_penalty"):
            if not isfinite(getattr(self, name)):
                raise SpecError(name, f"{getattr(self, name)} is not a finite number")
        for token, bias in self.logit_bias.items():
            if token < 0 or not isfinite(bias):
                raise SpecError("logit_bias", f"{token}: {bias} is not a token id with a finite number")

    @property
    def adjusts(self) -> bool:
        """Whether logits change before they become probs."""
        plain = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) == (1.0, 0.0, 0.0)
        return not plain or bool(self.logit_bias)


GREEDY = Sampling()


def masked(logits: Tensor, allowed: NDArray[np.bool_]) -> Tensor:
    """Logits (vocab,) with −∞ for each token that is not allowed."""
    return logits.masked_fill(~torch.from_numpy(allowed).to(logits.device), float("-inf"))


def adjusted(logits: Tensor, sampling: Sampling, prompt: Sequence[int], generated: Sequence[int]) -> Tensor:
    """Logits (vocab,) after penalties and biases; a copy where they change."""
    if not sampling.adjusts:
        return logits
    logits = logits.clone()
    if sampling.repetition_penalty != 1:
        seen = torch.tensor(sorted({*prompt, *generated}), dtype=torch.long, device=logits.device)
        old = logits[seen]
        logits[seen] = torch.where(old > 0, old / sampling.repetition_penalty, old * sampling.repetition_penalty)
    if generated and (sampling.presence_penalty or sampling.frequency_penalty):
        counts = Counter(generated)
        which = torch.tensor(list(counts), dtype=torch.long, device=logits.device)
        times = torch.tensor(list(counts.values()), dtype=logits.dtype, device=logits.device)
        logits[which] -= sampling.presence_penalty + sampling.frequency_penalty * times
    for token, bias in sampling.logit_bias.items():
        if token < len(logits):
            logits[token] += bias
    return logits


def sampled_probs(logits: Tensor, sampling: Sampling) -> Tensor:
    """The probs (vocab,) that a token is sampled from, for logits (vocab,) that are adjusted already; not normalized."""
    if sampling.temperature == 0:
        return torch.zeros_like(logits).index_fill_(0, logits.max(-1, keepdim=True).indices, 1.0)
    # logits minus their maximum, divided by a normal float32: neither inf − inf nor 0/0 at a temperature near 0
    temperature = max(sampling.temperature, torch.finfo(torch.float32).tiny)
    probs = torch.softmax((logits - logits.max()) / temperature, -1)
    if sampling.min_p > 0:
        probs = probs.masked_fill(probs < sampling.min_p * probs.max(), 0.0)
    if sampling.top_k is not None and sampling.top_k < len(probs):
        probs = probs.masked_fill(probs < probs.topk(sampling.top_k).values[-1], 0.0)
    if sampling.top_p < 1:
        probs = _fewest(probs / probs.sum(), sampling.top_p)
    return probs


def _fewest(probs: Tensor, top_p: float) -> Tensor:
    """The fewest probs, the largest first, that sum to top_p or more; the others 0. Of equal ones, the first tokens."""
    most = probs.topk(min(TOP_P_CANDIDATES, len(probs)))
    if most.values.sum() < top_p or most.values[-1] == most.values[0]:
        values, order = probs.sort(descending=True, stable=True)
    else:
        least = int((most.values.cumsum(-1) - most.values < top_p).sum()) - 1
        order = (probs >= most.values[least]).nonzero()[:, 0]  # with all that are equal to the last: sorted stably, as above
        values, index = probs[order].sort(descending=True, stable=True)
        order = order[index]
    kept = values.cumsum(-1) - values < top_p  # the most probable token stays in any case
    return torch.zeros_like(probs).index_copy_(0, order[kept], values[kept])


def uniforms(seeds: Sequence[int], numbers: Sequence[int]) -> Tensor:
    """A uniform number in [0, 1) for the token number numbers[i] of a request with seeds[i], in float64."""
    bits = draw(draw(torch.tensor(STREAM), torch.tensor(seeds)), torch.tensor(numbers))
    return ((bits >> 11) & (2**53 - 1)).double() / 2**53


def most_probable(logits: Tensor) -> list[int]:
    """The token with the largest of its row's logits (rows, vocab), of equal ones the first."""
    if logits.device.type != "cpu":
        return logits.max(-1).indices.tolist()
    return logits.detach().numpy().argmax(-1).tolist()  # torch's takes 15 times as long on a CPU


def sample_tokens(
    logits: Tensor, samplings: Sequence[Sampling], prompts: Sequence[Sequence[int]], generated: Sequence[Sequence[int]]
) -> list[int]:
    """The next token of each row, from logits (rows, vocab) in float32; prompts[i] and generated[i] are its tokens so far."""
    if all(sampling.temperature == 0 and not sampling.adjusts for sampling in samplings):
        return most_probable(logits)
    drawn = uniforms([sampling.seed for sampling in samplings], [len(tokens) for tokens in generated])
    rows = zip(logits, samplings, prompts, generated, drawn, strict=True)
    return [_sample(adjusted(row, how, prompt, made), how, u) for row, how, prompt, made, u in rows]


def _sample(logits: Tensor, sampling: Sampling, u: Tensor) -> int:
    if sampling.temperature == 0:
        return most_probable(logits[None])[0]
    return pick(sampled_probs(logits, sampling), u)


def pick(probs: Tensor, u: Tensor) -> int:
    """The token of probs (vocab,), which need not sum to 1, for a uniform number; never one of prob 0."""
    cumulative = probs.double().cumsum(-1)
    # above: the first token whose cumulative prob exceeds u; rounding may take u · total to the total itself
    index = torch.searchsorted(cumulative, (u.to(probs.device) * cumulative[-1]).view(1), right=True)
    last = int(torch.searchsorted(cumulative, cumulative[-1:]))
    return min(int(index), last)


def top_logprobs(logits: Tensor, token: int, count: int) -> tuple[float, list[tuple[int, float]]]:
    """The log-prob of a token under softmax(logits (vocab,)), and the `count` tokens with the largest ones."""
    logprobs = torch.log_softmax(logits.double(), -1)
    most = logprobs.topk(min(count, len(logprobs)))
    return float(logprobs[token]), list(zip(most.indices.tolist(), most.values.tolist(), strict=True))
