"""An interrupt (Ctrl-C) after so many lines of Python of the serving code: between any two of them, as a signal arrives."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import dovetail

ROOT = Path(dovetail.__file__).parent
ROOMS = tuple(f"{(ROOT / room).resolve(strict=True)}/" for room in ("serving", "state", "model", "decoding"))


@contextmanager
def interrupted(after: int) -> Iterator[None]:
    """Raise KeyboardInterrupt once `after` lines have run."""
    left = after

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.startswith(ROOMS):
            return None
        if event == "line":
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
