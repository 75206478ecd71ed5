"""Answers of a server, read from JSON that is not trusted: tokens, log-probs, text.

    tokens, token_logprobs, top_logprobs       OpenAI's completions; a token is a string, `token_id:7` where ids were asked for
    content: [{id, token, logprob, top_logprobs}]      llama.cpp, and OpenAI's chat form

A token is known by its id where the server gives ids, else by its string. Strings collide (vLLM: 15 to 20 distinct ones of 20),
so that ids are asked for. Every list is bounded and every number checked; a log-prob that is not finite equals nothing.
"""

from __future__ import annotations

import dataclasses as dc
import re
from collections.abc import Iterable, Mapping, Sequence
from math import inf, isfinite, nan
from typing import Any

from dovetail.base.errors import FileError, printable

Key = int | str  # a token: its id, or its string
MAX_STEPS = 8192  # positions of one choice
MAX_TOP = 256  # log-probs per position
MAX_CHOICES = 256
MAX_TEXT = 1 << 18  # characters of one choice
MAX_KEY = 200  # characters of a token
MAX_ID = 2**31
BY_ID = re.compile(r"token_id:(\d{1,9})")


@dc.dataclass(frozen=True)
class TokenStep:
    """One token, with the log-probs of the likeliest tokens in its place."""

    token: Key
    logprob: float | None
    top: Mapping[Key, float]
    text: str = ""  # the token's string, where the server gives one

    def row(self) -> Mapping[Key, float]:
        """The log-probs of the position: the likeliest tokens, and the chosen one."""
        return self.top if self.logprob is None or self.token in self.top else {**self.top, self.token: self.logprob}


@dc.dataclass(frozen=True)
class Answer:
    """One choice: its steps (without log-probs there are none), text and ids."""

    steps: tuple[TokenStep, ...] = ()
    text: str = ""
    ids: tuple[int, ...] | None = None  # None: the server does not give ids
    finish: str | None = None
    cached: int | None = None  # prompt tokens read from the prefix cache; None: not reported

    @property
    def tokens(self) -> tuple[Key, ...]:
        """The generated tokens, by id where they are known."""
        return self.ids if self.ids is not None else tuple(step.token for step in self.steps)


class UnreadableAnswer(FileError):
    """An answer without the fields that were asked for."""


def choices_of(data: Mapping[str, Any]) -> list[Answer]:
    """The choices of an answer, by index."""
    choices = data.get("choices")
    if not isinstance(choices, list) or not 0 < len(choices) <= MAX_CHOICES:
        problem = printable(str(data.get("error", ""))) or "no choices"
        raise UnreadableAnswer(f"the answer cannot be read: {problem}")
    try:
        by_index = sorted(choices, key=lambda choice: int(choice.get("index") or 0))
        return [_answer(choice, cached_of(data)) for choice in by_index]
    except (AttributeError, KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
        raise UnreadableAnswer(f"the answer cannot be read ({printable(repr(error))})") from error


def joined(events: Iterable[Mapping[str, Any]]) -> Answer:
    """The answer of a stream: texts, ids and steps of its events in order."""
    text, ids, steps = "", list[int](), list[TokenStep]()
    with_ids, finish = False, None
    for event in events:
        if "error" in event:
            raise UnreadableAnswer(f"the stream ends with an error: {printable(str(event['error']))}")
        if not event.get("choices"):
            continue  # usage, or a comment
        (part,) = choices_of(event)
        text, steps = text + part.text, [*steps, *part.steps]
        if part.ids is not None:
            with_ids, ids = True, [*ids, *part.ids]
        finish = part.finish or finish
        if len(text) > MAX_TEXT or len(steps) > MAX_STEPS:
            raise UnreadableAnswer(f"the stream is longer than {MAX_STEPS:,} tokens")
    return Answer(tuple(steps), text, tuple(ids) if with_ids else None, finish)


def cached_of(data: Mapping[str, Any]) -> int | None:
    """The number of prompt tokens that came from the prefix cache, where the server reports it."""
    usage = data.get("usage")
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return cached if _whole(cached) else None


def _answer(choice: Mapping[str, Any], cached: int | None) -> Answer:
    text, finish = choice.get("text") or "", choice.get("finish_reason")
    if not isinstance(text, str) or len(text) > MAX_TEXT:
        raise ValueError("its text is not a string of bounded length")
    steps = _steps(choice.get("logprobs") or {})
    ids = choice.get("token_ids")
    by_id = [step.token for step in steps if isinstance(step.token, int)]
    if ids is None and steps and len(by_id) == len(steps):
        ids = by_id
    if ids is not None and not (isinstance(ids, list) and len(ids) <= MAX_STEPS and all(_whole(i) for i in ids)):
        raise ValueError("its token_ids are not ids")
    return Answer(steps, text, None if ids is None else tuple(ids), finish if isinstance(finish, str) else None, cached)


def _steps(logprobs: Mapping[str, Any]) -> tuple[TokenStep, ...]:
    if "content" in logprobs:
        return tuple(_content(entry) for entry in _list(logprobs["content"], MAX_STEPS))
    tokens = _list(logprobs.get("tokens"), MAX_STEPS)
    chosen = _list(logprobs.get("token_logprobs"), MAX_STEPS) or [None] * len(tokens)
    tops = _list(logprobs.get("top_logprobs"), MAX_STEPS) or [None] * len(tokens)
    if not len(tokens) == len(chosen) == len(tops):
        raise ValueError(f"{len(tokens)} tokens, {len(chosen)} log-probs and {len(tops)} rows")
    rows = (_row((top or {}).items()) for top in tops)
    return tuple(TokenStep(_key(t), _number(p), row, str(t)) for t, p, row in zip(tokens, chosen, rows, strict=True))


def _content(entry: Mapping[str, Any]) -> TokenStep:
    top = [(_entry_key(other), other["logprob"]) for other in _list(entry.get("top_logprobs"), MAX_TOP)]
    return TokenStep(_entry_key(entry), _number(entry.get("logprob")), _row(top), str(entry.get("token", "")))


def _entry_key(entry: Mapping[str, Any]) -> Key:
    return entry["id"] if _whole(entry.get("id")) else _key(entry["token"])


def _row(items: Iterable[tuple[Key, Any]]) -> dict[Key, float]:
    """Log-probs by token. A row where two tokens share a string keeps the likelier one."""
    row: dict[Key, float] = {}
    for count, (token, value) in enumerate(items):
        if count >= MAX_TOP:
            raise ValueError(f"more than {MAX_TOP} log-probs per position")
        number = _number(value)
        key = _key(token)
        row[key] = nan if number is None else max(number, row.get(key, -inf))
    return row


def _key(token: Any) -> Key:
    if isinstance(token, int):
        return token
    match = BY_ID.fullmatch(token)
    return int(match.group(1)) if match else token[:MAX_KEY]


def _list(value: Any, most: int) -> Sequence[Any]:
    if value is None:
        return []
    if not isinstance(value, list) or len(value) > most:
        raise ValueError(f"is not a list of at most {most:,}")
    return value


def _number(value: Any) -> float | None:
    """A log-prob, or None where there is none; NaN for one that is not finite."""
    if value is None:
        return None
    number = float(value)
    return number if isfinite(number) else nan


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_ID
