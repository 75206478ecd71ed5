"""Text as it is written: tokens come one by one, and what is certain of the text is given at once.

A token may be part of a character (three bytes of four), or change how the one before it is written (WordPiece's ##), so a
token's text is what it adds to the text of a few before it; what ends in half a character waits for the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.text.tokenizer import Tokenizer

HALF = "\N{REPLACEMENT CHARACTER}"  # what the engine writes for bytes that form no character


class TextStream:
    """push(id) -> the text that is certain now; end() -> the rest. Joined they are the text of all ids behind the prompt's."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
        self.ids = list(prompt)  # from the last place where the text was certain
        self.said = tokenizer.decode(self.ids)  # of these, what was given
        self.last = len(self.ids)  # ids up to which it was given

    def push(self, token: int) -> str:
        """One more token."""
        self.ids.append(token)
        text = self.tokenizer.decode(self.ids)
        if len(text) <= len(self.said) or text.endswith(HALF) or not text.startswith(self.said):
            return ""
        new = text[len(self.said) :]
        self.ids = self.ids[self.last :]  # the ids given last stay, as what comes may depend on them
        self.last = len(self.ids)
        self.said = self.tokenizer.decode(self.ids)
        return new

    def end(self) -> str:
        """What was held back, half a character as �."""
        text = self.tokenizer.decode(self.ids)
        shared = 0
        while shared < min(len(text), len(self.said)) and text[shared] == self.said[shared]:
            shared += 1
        self.said = text
        return text[shared:]
