"""Tokens: a corpus as one long sequence of token ids, cut into documents.

    ids    e0 e1 e2 e3 │ e4 e5 │ e6 e7 e8 …        ends  4 6 …     the position behind the last token of each document

Any window of it can be read without reading what comes before.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Tokens(ABC):
    """The token ids of a corpus."""

    name: str  # for messages
    tokens: int
    documents: int
    fingerprint: str  # of the content: equal corpora have equal ones

    @abstractmethod
    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Return the ids (stop − start,) of a window, unsigned or not, as they are stored."""

    @abstractmethod
    def ends(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the document ends e with start < e ≤ stop, in order."""
