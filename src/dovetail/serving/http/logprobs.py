r"""Log-probs in OpenAI's two shapes, and vLLM's `prompt_logprobs`.

completions    {tokens: […], token_logprobs: […], top_logprobs: [{token: logprob}], text_offset: […]}
chat           {content: [{token, logprob, bytes, top_logprobs: [{token, logprob, bytes}]}]}

Tokens by name, as log-probs show them: text, bytes, or `token_id:7`.

A token's text is what it adds behind another token: alone, many tokenizers drop its leading space. A token that is part of a
character has no text of its own; its bytes are `bytes:\xf0\x9f` in completions, as OpenAI writes them, and a list in chats.
"""

from __future__ import annotations

import dataclasses as dc
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from dovetail.serving.request import Logprob
from dovetail.text.stream import HALF
from dovetail.text.tokenizer import Tokenizer

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


BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
NAMED = 1 << 16  # tokens whose names are kept
PLAIN = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
OTHERS = [byte for byte in range(256) if byte not in PLAIN]
BYTES = {**{chr(byte): byte for byte in PLAIN}, **{chr(256 + i): byte for i, byte in enumerate(OTHERS)}}  # GPT-2's alphabet


class TokenNames:
    """The names of the tokens of a vocabulary; without a tokenizer, their ids."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self.text = lru_cache(NAMED)(self._text)
        self._anchor = [] if tokenizer is None else _letter(tokenizer)

    def _text(self, token: int) -> str:
        if self.tokenizer is None:
            return f"token_id:{token}"
        before = self.tokenizer.decode(self._anchor, skip_special=False)
        both = self.tokenizer.decode([*self._anchor, token], skip_special=False)
        return both[len(before) :] if both.startswith(before) else self.tokenizer.decode([token], skip_special=False)

    def bytes(self, token: int) -> list[int] | None:
        """Return the bytes of a token; None where they are not known."""
        text = self.text(token)
        if HALF not in text or self.tokenizer is None:
            return list(text.encode())
        piece = self.tokenizer.engine.id_to_token(token) or ""
        if match := BYTE.fullmatch(piece):
            return [int(match[1], 16)]
        return [BYTES[character] for character in piece] if piece and set(piece) <= set(BYTES) else None

    def unique(self, token: int) -> str:
        """Return the text of a token, or its bytes where these are no text."""
        text = self.text(token)
        if HALF not in text:
            return text
        values = self.bytes(token)
        return text if values is None else "bytes:" + "".join(f"\\x{value:02x}" for value in values)


def _letter(tokenizer: Tokenizer) -> list[int]:
    """Return a token of one letter, behind which the text of another keeps its leading space; none where there is no such."""
    for letter in "aetn":
        ids = tokenizer.prompt(letter, add_special=False)
        if len(ids) == 1 and tokenizer.decode(ids).strip() == letter:
            return ids
    return []
