"""Log-probs in OpenAI's two shapes, and vLLM's `prompt_logprobs`.

completions    {tokens: […], token_logprobs: […], top_logprobs: [{token: logprob}], text_offset: […]}
chat           {content: [{token, logprob, bytes, top_logprobs: [{token, logprob, bytes}]}]}
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Sequence
from typing import Any

from dovetail.serving.http.names import TokenNames
from dovetail.serving.request import Logprob

LEAST = -9999.0  # JSON has no −∞


@dc.dataclass(frozen=True, slots=True)
class Scored:
    """A token, where its text begins, and its log-prob where it was asked for."""

    token: int
    offset: int  # in the text of the choice
    logprob: Logprob | None


def finite(value: float) -> float:
    """Return a log-prob that JSON can hold."""
    return value if value > LEAST else LEAST


class LogprobShapes:
    """Builds the shapes; `by_id` names tokens `token_id:7`."""

    def __init__(self, names: TokenNames, by_id: bool) -> None:
        self.names, self.by_id = names, by_id

    def completion(self, scored: Sequence[Scored], base: int = 0) -> dict[str, Any]:
        """Return the shape of completions; `base` is added to the offsets."""
        return {
            "tokens": [self._key(one.token) for one in scored],
            "token_logprobs": [None if one.logprob is None else finite(one.logprob.logprob) for one in scored],
            "top_logprobs": [None if one.logprob is None else self._row(one.logprob) for one in scored],
            "text_offset": [base + one.offset for one in scored],
        }

    def chat(self, scored: Sequence[Scored]) -> dict[str, Any]:
        """Return the shape of chat completions."""
        entries = [one.logprob for one in scored if one.logprob is not None]
        content = [
            {**self._entry(one.token, one.logprob), "top_logprobs": [self._entry(*pair) for pair in one.top]} for one in entries
        ]
        return {"content": content, "refusal": None}

    def prompt(self, logprobs: Sequence[Logprob]) -> list[Any]:
        """Return vLLM's shape: null for the first token, then a row per token, by id."""
        return [None, *(self._ranked(one) for one in logprobs)]

    def _ranked(self, one: Logprob) -> dict[str, Any]:
        rows: dict[int, tuple[float, int | None]] = {token: (value, i) for i, (token, value) in enumerate(one.top, 1)}
        rows.setdefault(one.token, (one.logprob, None))
        return {
            str(token): {"logprob": finite(value), "rank": rank, "decoded_token": self.names.text(token)}
            for token, (value, rank) in rows.items()
        }

    def _row(self, one: Logprob) -> dict[str, float]:
        """The largest log-probs and that of the token itself. Of tokens with one name, the most probable stays."""
        row = dict[str, float]()
        for token, value in [*one.top, (one.token, one.logprob)]:
            row.setdefault(self._key(token), finite(value))
        return row

    def _key(self, token: int) -> str:
        return f"token_id:{token}" if self.by_id else self.names.unique(token)

    def _entry(self, token: int, value: float) -> dict[str, Any]:
        name = f"token_id:{token}" if self.by_id else self.names.text(token)
        return {"token": name, "logprob": finite(value), "bytes": self.names.bytes(token)}
