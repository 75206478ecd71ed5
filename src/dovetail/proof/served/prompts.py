"""Prompts for a server: random tokens from its own vocabulary, and prefixes of what it generated.

A prefix is built from ids. Text cannot be cut and encoded again without loss, so that a server that takes text alone needs its
tokenizer, and a prefix whose text has other tokens than the prefix is not used.
"""

from __future__ import annotations

import dataclasses as dc
import random
from collections.abc import Sequence

from dovetail.proof.answers import Answer
from dovetail.text.tokenizer import Tokenizer

TEXT = """the river ran past an old stone mill where two men sat and spoke of rain while children played near the gate with a
red ball and a small dog slept in the sun by the open door of a house that no one had lived in for many years before"""
WORDS = TEXT.split()
TRIES = 60  # words that are tried to reach a number of tokens


@dc.dataclass(frozen=True)
class ServedPrompt:
    """What is sent, and its ids where they are known."""

    send: tuple[int, ...] | str
    ids: tuple[int, ...] | None

    def data(self) -> list[int] | str:
        """The prompt as JSON data."""
        return self.send if isinstance(self.send, str) else list(self.send)


class Prompts:
    """A source of prompts: by ids from `pool`, or text, whose tokens `tokenizer` counts."""

    def __init__(self, pool: Sequence[int] | None, tokenizer: Tokenizer | None, seed: int = 0) -> None:
        self.pool, self.tokenizer = pool, tokenizer
        self.seed, self.random = seed, random.Random(seed)

    def new(self, length: int, prefix: ServedPrompt | None = None) -> ServedPrompt:
        """A prompt of `length` random tokens (of words, where nothing counts tokens), after the tokens of `prefix`."""
        if self.pool is not None:
            begin = () if prefix is None else prefix.ids or ()
            ids = (*begin, *(self.random.choice(self.pool) for _ in range(length - len(begin))))
            return ServedPrompt(ids, ids)
        text = "" if prefix is None else f"{prefix.send}"
        if self.tokenizer is None:
            words = [self.random.choice(WORDS) for _ in range(max(1, length - len(text.split())))]
            return ServedPrompt(" ".join([text, *words]).strip(), None)
        return self._text(text, length, self.tokenizer)

    def _text(self, text: str, length: int, tokenizer: Tokenizer) -> ServedPrompt:
        """Append words until the text has `length` tokens, or a few more where no word fits."""
        for _ in range(TRIES * length):
            have = len(tokenizer.prompt(text)) if text else 0
            if have >= length:
                break
            longer = f"{text} {self.random.choice(WORDS)}".strip()
            if len(tokenizer.prompt(longer)) <= length or self.random.random() < 1 / TRIES:
                text = longer
        return ServedPrompt(text, tuple(tokenizer.prompt(text)))

    def repeating(self, length: int) -> ServedPrompt:
        """A prompt that repeats a few tokens, which n-gram speculation continues."""
        period = 5
        pattern = self.new(period)
        if pattern.ids is not None and self.pool is not None:
            ids = (pattern.ids * (length // period + 1))[:length]
            return ServedPrompt(ids, ids)
        text = " ".join([str(pattern.send)] * (length // period))
        return ServedPrompt(text, None if self.tokenizer is None else tuple(self.tokenizer.prompt(text)))

    def after(self, prompt: ServedPrompt, answer: Answer, tokens: int) -> ServedPrompt | None:
        """The prompt followed by the first generated tokens; None where their text has other tokens, or where the tokens that
        have log-probs are not those of the text: mlx-lm 0.32.2 names alternatives there."""
        if self.pool is not None:
            if prompt.ids is None or answer.ids is None or len(answer.ids) < tokens:
                return None
            ids = (*prompt.ids, *answer.ids[:tokens])
            return ServedPrompt(ids, ids)
        if self.tokenizer is None or prompt.ids is None or len(answer.steps) < tokens:
            return None
        pieces = [step.token if isinstance(step.token, str) else self.tokenizer.decode([step.token]) for step in answer.steps]
        generated = "".join(pieces[:tokens])
        if not answer.text.startswith(generated):
            return None
        text = str(prompt.send) + generated
        ids = tuple(self.tokenizer.prompt(text))
        exact = len(ids) == len(prompt.ids) + tokens and ids[: len(prompt.ids)] == prompt.ids and "�" not in text
        return ServedPrompt(text, ids) if exact else None
