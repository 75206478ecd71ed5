"""Ctrl-C during a run: the step that runs is finished, so that weights and metrics belong together; a second Ctrl-C raises."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Interrupt:
    """`with Interrupt() as interrupted: … if interrupted(): stop`. In another thread than the main one it is never set."""

    def __init__(self) -> None:
        self.received = False
        self.before: Any = None

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self.before = signal.signal(signal.SIGINT, self._receive)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.before is not None:
            signal.signal(signal.SIGINT, self.before)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            raise KeyboardInterrupt
        self.received = True

    def __call__(self) -> bool:
        """Whether Ctrl-C was pressed."""
        return self.received
