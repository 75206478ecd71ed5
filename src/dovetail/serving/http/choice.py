r"""One choice of an answer: tokens of the engine become text, up to a stop string.

Where there are stop strings, tokens are reported with their text: those of text that is held back wait with it, and those of a
stop string are dropped. All of them count as generated.

Stop strings: text that may be the beginning of one is held back until it is known.

stops = StopStrings(["\n\n", "User:"])
stops.push("Yes.\nUs")   -> "Yes."       "\nUs" waits: neither "\n" nor "Us" may be shown if a stop string follows
stops.push("ually")      -> "\nUsually"
stops.push("\n\nmore")   -> ""           and stops.found is true
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Collection, Sequence

from dovetail.serving.http.logprobs import Scored
from dovetail.serving.request import Finish, Output
from dovetail.text.stream import TextStream


@dc.dataclass(frozen=True, slots=True)
class Piece:
    """What is new in a choice."""

    index: int
    text: str
    tokens: list[Scored]
    finish: Finish | None


class Choice:
    """push(output) -> the text and tokens that are final now."""

    def __init__(
        self,
        index: int,
        stream: TextStream | None,
        *,
        stops: Sequence[str] = (),
        min_tokens: int = 0,
        stop_tokens: Collection[int] = (),
    ) -> None:
        self.index, self.stream, self.stops = index, stream, StopStrings(stops)
        self.min_tokens, self.stop_tokens = min_tokens, stop_tokens
        self.count = 0  # generated tokens
        self.finish: Finish | None = None
        self._decoded = self._released = 0  # characters
        self._waiting: list[Scored] = []

    def push(self, output: Output) -> Piece | None:
        """Add an output of the engine; None where it brings nothing that can be shown yet."""
        if self.finish is not None:  # a stop string ended the choice, and the engine does not know it yet
            return None
        text = ""
        for i, token in enumerate(output.tokens):
            self._waiting.append(Scored(token, self._decoded, output.logprobs[i] if output.logprobs else None))
            self.count += 1
            ends = output.finish == "stop" and i == len(output.tokens) - 1 and token in self.stop_tokens
            if self.stream is not None and not ends:
                text += self._take(self.stream.push(token))
            if self.stops.found:
                break
        if output.finish is not None and not self.stops.found:
            text += self._take("" if self.stream is None else self.stream.end())
            text += "" if self.stops.found else self.stops.end()
        self._released += len(text)
        self.finish = "stop" if self.stops.found else output.finish
        tokens = self._ready()
        return Piece(self.index, text, tokens, self.finish) if text or tokens or self.finish else None

    def _take(self, text: str) -> str:
        self._decoded += len(text)
        return self.stops.push(text) if self.count > self.min_tokens else self.stops.end() + text

    def _ready(self) -> list[Scored]:
        """Take the tokens whose text was released, at least in part; without stop strings and at a plain end, all."""
        everything = not self.stops.stops or (self.finish is not None and not self.stops.found)
        ready = [one for one in self._waiting if everything or one.offset < self._released]
        self._waiting = self._waiting[len(ready) :]
        return ready


class StopStrings:
    """push(text) -> the text that no stop string can begin in; `found` once one is complete."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops, self.held, self.found = tuple(stops), "", False

    def push(self, text: str) -> str:
        """Add text; return what is final. Behind a stop string nothing is."""
        text, self.held = self.held + text, ""
        places = [place for stop in self.stops if (place := text.find(stop)) >= 0]
        if places:
            self.found = True
            return text[: min(places)]
        keep = max((_overlap(text, stop) for stop in self.stops), default=0)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def end(self) -> str:
        """Return the text that was held back."""
        text, self.held = self.held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of a text that begins a stop string."""
    place = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while place >= 0 and not stop.startswith(text[place:]):
        place = text.find(stop[0], place + 1)
    return 0 if place < 0 else len(text) - place
