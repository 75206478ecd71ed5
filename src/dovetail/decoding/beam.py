"""Beam search: the most probable continuations, by a search that keeps the `beams` best unfinished ones.

    score(y) = Σ log p(yᵢ | y₁ … yᵢ₋₁) / len(y)^length_penalty

Of all continuations of the beams by one token, the best max(2, 1 + end tokens) · beams are candidates. Those among the first
`beams` that end are finished; the best others are the next beams. The search ends when no beam can improve on the worst
finished one: at its present length, unless `early_stopping` is "never", which takes the longest length where that is better
for it; or, with early_stopping=True, when `beams` are finished. As in transformers, whose tokens it gives.

A beam that continues in several ways is forked: rows share the pages of its KV cache until they write.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Collection, Sequence
from typing import Literal

import torch
from torch import Tensor

from dovetail.base.errors import SpecError
from dovetail.decoding.generation import check_generates, encode_source, pool_for, token_limit
from dovetail.decoding.steps import Decoder
from dovetail.model.model import ModelModule
from dovetail.nn.finite import check_result
from dovetail.state.pool import Pool

MOST = 64  # beams


@dc.dataclass(frozen=True)
class Beam:
    """A continuation: its tokens, and the sum of their log-probs; once it is finished, divided by its length penalty."""

    tokens: tuple[int, ...]
    score: float
    row: int = -1  # of the pool, while it continues


def check_beams(beams: int) -> None:
    """Raise SpecError for a number of beams outside its range."""
    if not 1 <= beams <= MOST:
        raise SpecError("beams", f"{beams} is not from 1 to {MOST}")


@torch.inference_mode()
def beam_search(
    model: ModelModule,
    prompt: Tensor | Sequence[int],
    max_tokens: int,
    *,
    beams: int = 4,
    length_penalty: float = 1.0,
    early_stopping: bool | Literal["never"] = False,
    stop: Collection[int] = (),
    start: Sequence[int] = (),
) -> list[Beam]:
    """Return up to `beams` finished continuations of a prompt (n,), the best first. A token of `stop` ends one, and is its
    last; `start` are the first decoder tokens of an encoder–decoder."""
    spec, device = model.part, model.device
    check_generates(spec)
    check_beams(beams)
    inputs = torch.as_tensor(prompt, dtype=torch.long, device=device)
    max_tokens = token_limit(spec, len(inputs), max_tokens)
    capacity = len(inputs) + len(start) + max_tokens
    pool = pool_for(model, beams, capacity, len(inputs), layout="paged")
    if spec.encoder is not None:
        encode_source(model, pool, inputs)
        inputs = torch.tensor(list(start), dtype=torch.long, device=device)
    if not len(inputs):
        raise SpecError("prompt", "is empty", "give at least one token")
    decoder, finished, running = Decoder(model, pool), list[Beam](), [Beam((), 0.0, row=0)]
    for length in range(1, max_tokens + 1):
        tokens = inputs[None] if length == 1 else torch.tensor([[beam.tokens[-1]] for beam in running], device=device)
        logits = decoder.step(tokens, [beam.row for beam in running]).float()
        check_result(logits, f"logits of token {length}")
        candidates = _candidates(torch.log_softmax(logits, -1), running, max(2, 1 + len(stop)) * beams)
        last = length == max_tokens
        ended = [beam for beam in candidates[:beams] if last or beam.tokens[-1] in stop]
        finished += [Beam(beam.tokens, beam.score / length**length_penalty) for beam in ended]
        finished = sorted(finished, key=lambda beam: -beam.score)[:beams]
        best = [beam for beam in candidates if beam.tokens[-1] not in stop][:beams]
        if last or not best or (len(finished) == beams and early_stopping is True):
            break
        reachable = max_tokens if early_stopping == "never" and length_penalty > 0 else length
        if len(finished) == beams and best[0].score / reachable**length_penalty <= finished[-1].score:
            break
        running = _place(pool, best, beams)
    return finished


def _candidates(logprobs: Tensor, running: Sequence[Beam], count: int) -> list[Beam]:
    """The best continuations by one token, from log-probs (beams, vocab); each in the row of the beam that it continues."""
    scores = logprobs + torch.tensor([beam.score for beam in running], device=logprobs.device)[:, None]
    best = scores.flatten().topk(min(count, scores.numel()))
    result: list[Beam] = []
    for score, index in zip(best.values.tolist(), best.indices.tolist(), strict=True):
        beam, token = running[index // logprobs.shape[1]], index % logprobs.shape[1]
        result.append(Beam((*beam.tokens, token), score, beam.row))
    return result


def _place(pool: Pool, best: Sequence[Beam], rows: int) -> list[Beam]:
    """Give each beam a row: the first that continues a row keeps it, others fork it into rows that no beam continues."""
    free = [row for row in range(rows) if row not in {beam.row for beam in best}]
    placed: list[Beam] = []
    for beam in best:
        if any(other.row == beam.row for other in placed):
            row = free.pop()
            pool.fork(beam.row, row)
            beam = dc.replace(beam, row=row)
        placed.append(beam)
    return placed
