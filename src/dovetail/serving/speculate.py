"""Speculative decoding: a drafter guesses the next tokens, and one step of the model checks them all.

    logits behind the last token and behind each of k drafts      one step of 1 + k tokens per row
    token i is sampled from logits i, as it would be without drafts; drafts are kept as long as they are the sampled tokens

The uniform number of each sampled token is a function of the seed and the number of the token (sampling.py), so the tokens are
those of a run without drafts, at any temperature: not only their distribution is the model's. With acceptance probability a per
draft, a step gives (1 − a^(k+1)) / (1 − a) tokens on average.

A draft model that samples with the same uniform numbers agrees with the target wherever their cumulative probs do, more often
than with numbers of its own.   Leviathan et al. 2023; Chen et al. 2023; Saxena 2023 (prompt look-up).
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Sequence

import torch
from torch import Tensor

from dovetail.base.errors import InputError
from dovetail.decoding.sampling import sample_tokens
from dovetail.decoding.steps import Decoder
from dovetail.model.model import ModelModule
from dovetail.serving.adapters import Adapters
from dovetail.serving.schedule import Continuation
from dovetail.state.pool import Pool


class Drafter:
    """Guesses the next tokens of continuations. The engine calls the other methods for drafters that follow the target."""

    def draft(self, ones: Sequence[Continuation], counts: Sequence[int]) -> list[list[int]]:
        """Up to counts[i] tokens that may follow the tokens of ones[i]."""
        raise NotImplementedError

    def attach(self, adapters: Adapters) -> None:
        """Called once by the engine, with the adapters of the target: a drafter that runs parts of the target needs them."""

    def observe(self, one: Continuation, first: int, hidden: Tensor) -> None:
        """Called in each step with the hidden states (n, embed) of the target at the tokens from number `first` on; the last of
        them may be drafts, which are not sampled yet."""

    def fork(self, one: Continuation, other: Continuation) -> None:
        """Called where `other` begins with the tokens and the decode state of `one`."""

    def reset(self) -> None:
        """Called where all rows begin anew: forget them, whatever state an interrupt left them in."""


def sample_drafts(logits: Tensor, ones: Sequence[Continuation], drafts: Sequence[Sequence[int]]) -> list[int]:
    """The next draft of each continuation behind drafts[i], from logits (rows, vocab), as the target samples its tokens."""
    samplings = [one.sampling for one in ones]
    prompts = [one.tokens[: one.prompt] for one in ones]
    generated = [[*one.generated, *before] for one, before in zip(ones, drafts, strict=True)]
    return sample_tokens(logits.float().cpu(), samplings, prompts, generated)


@dc.dataclass(frozen=True)
class PromptLookup(Drafter):
    """Guesses that the last tokens are followed by what followed them before: in summaries, edits and code they often are."""

    longest: int = 4  # tokens that must agree, tried first
    shortest: int = 2
    window: int = 4096  # tokens that are searched

    def draft(self, ones: Sequence[Continuation], counts: Sequence[int]) -> list[list[int]]:
        return [self._follow(one.tokens[-self.window :], count) for one, count in zip(ones, counts, strict=True)]

    def _follow(self, tokens: list[int], count: int) -> list[int]:
        for size in range(min(self.longest, len(tokens) - 1), self.shortest - 1, -1):
            end = tokens[-size:]
            for begin in range(len(tokens) - size - 1, -1, -1):  # the newest first
                if tokens[begin : begin + size] == end:
                    return tokens[begin + size : begin + size + count]
        return []


class DraftModel(Drafter):
    """A smaller model with the same vocabulary that runs ahead, with the same sampling."""

    def __init__(self, model: ModelModule, *, rows: int, longest: int, target: ModelModule) -> None:
        if model.part.vocab != target.part.vocab:
            raise InputError(f"drafter: has {model.part.vocab} tokens; the model has {target.part.vocab}")
        if model.part.encoder is not None:
            raise InputError("drafter: is an encoder–decoder; give a decoder")
        self.model = model
        self.pool = Pool(model.part, rows, longest, dtype=model.dtype, device=model.device, layout="paged")
        self.decoder = Decoder(model, self.pool)
        self.rows: dict[int, tuple[Continuation, list[int]]] = {}  # row -> whose tokens the pool holds there, and which

    @torch.inference_mode()
    def draft(self, ones: Sequence[Continuation], counts: Sequence[int]) -> list[list[int]]:
        guesses: list[list[int]] = [[] for _ in ones]
        for one in ones:
            self._catch_up(one)
        for i in range(max(counts, default=0)):
            active = [j for j, count in enumerate(counts) if i < count]
            last = [[*ones[j].tokens, *guesses[j]][-1] for j in active]
            rows = [ones[j].held_row for j in active]
            logits = self.decoder.step(torch.tensor(last)[:, None].to(self.model.device), rows)
            sampled = sample_drafts(logits, [ones[j] for j in active], [guesses[j] for j in active])
            for j, token in zip(active, sampled, strict=True):
                self.rows[ones[j].held_row][1].append([*ones[j].tokens, *guesses[j]][-1])
                guesses[j].append(token)
        return guesses

    def reset(self) -> None:
        self.pool.reset()
        self.rows.clear()

    def _catch_up(self, one: Continuation) -> None:
        """Let the row of the pool hold all tokens of a continuation but the last."""
        number, want = one.held_row, one.tokens[:-1]
        owner, held = self.rows.get(number, (None, []))
        same = 0
        if owner is one:
            same = next((i for i, (a, b) in enumerate(zip(held, want, strict=False)) if a != b), min(len(held), len(want)))
        reached = self.pool.rollback(number, same) if self.pool.lengths[number] else 0
        if rest := want[reached:]:
            self.decoder.step(torch.tensor([rest], device=self.model.device), [number])
        if want:
            self.pool.marks[number] = []
            self.pool.mark(number)  # a recurrent state returns here when drafts are rejected
        self.rows[number] = (one, list(want))
