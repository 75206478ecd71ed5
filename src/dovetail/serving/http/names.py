"""Tokens by name, as log-probs show them: text, bytes, or `token_id:7`.

A token's text is what it adds behind another token: alone, many tokenizers drop its leading space. A token that is part of a
character has no text of its own; its bytes are `bytes:\\xf0\\x9f` in completions, as OpenAI writes them, and a list in chats.
"""

from __future__ import annotations

import re
from functools import lru_cache

from dovetail.text.stream import HALF
from dovetail.text.tokenizer import Tokenizer

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
