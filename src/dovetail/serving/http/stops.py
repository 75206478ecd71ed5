"""Stop strings: text that may be the beginning of one is held back until it is known.

stops = StopStrings(["\\n\\n", "User:"])
stops.push("Yes.\\nUs")   -> "Yes."       "\\nUs" waits: neither "\\n" nor "Us" may be shown if a stop string follows
stops.push("ually")      -> "\\nUsually"
stops.push("\\n\\nmore")   -> ""           and stops.found is true
"""

from __future__ import annotations

from collections.abc import Sequence


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
