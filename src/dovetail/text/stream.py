"""Streaming detokenization: tokens come one by one, and text that later tokens cannot change is returned at once.

A token may be part of a character (three bytes of four), or change the text of the token before it (WordPiece's ##). So the
text of a token is what it adds to the text of the tokens just before it, and an incomplete character waits for its last byte.
"""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.text.tokenizer import Tokenizer

HALF = "\N{REPLACEMENT CHARACTER}"  # the engine decodes an incomplete character to this


class TextStream:
    """push(id) -> the text that is final now; end() -> the rest. Joined they are the text of all ids behind the prompt."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), *, skip_special: bool = True) -> None:
        self.tokenizer, self.skip_special = tokenizer, skip_special
        self.ids = list(prompt)  # the ids whose text is decoded together
        self.emitted = self._decoded()  # the part of that text that was returned
        self.last = len(self.ids)  # the number of ids whose text was returned

    def push(self, token: int) -> str:
        """Add a token and return the text that is final now."""
        self.ids.append(token)
        text = self._decoded()
        if len(text) <= len(self.emitted) or text.endswith(HALF) or not text.startswith(self.emitted):
            return ""
        new = text[len(self.emitted) :]
        self.ids = self.ids[self.last :]  # the last ids stay: the text of the next may depend on them
        self.last = len(self.ids)
        self.emitted = self._decoded()
        return new

    def end(self) -> str:
        """Return the text that was held back; an incomplete character becomes �."""
        text = self._decoded()
        shared = 0
        while shared < min(len(text), len(self.emitted)) and text[shared] == self.emitted[shared]:
            shared += 1
        self.emitted = text
        return text[shared:]

    def _decoded(self) -> str:
        return self.tokenizer.decode(self.ids, skip_special=self.skip_special)
