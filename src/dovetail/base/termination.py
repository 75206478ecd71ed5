"""End this process on a signal: soon, and with its children.

    with watched():              SIGTERM raises Terminated in the main thread, as SIGINT raises KeyboardInterrupt
        with delaying():         a checkpoint is being written: Terminated waits for it
            ...
        with Interrupt() as interrupted:        Ctrl-C sets it; a second one raises KeyboardInterrupt

An exception can be lost: Python drops one that is raised in a weakref callback or in __del__, and a long call into C does not
see the signal before it returns. A thread therefore watches, too: SOON after a signal it kills the children and ends the
process with 128 + the signal's number. Only a checkpoint that is being written delays that, up to LONGEST after the signal.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn

SOON = 1.5  # seconds that a verb has to unwind after a signal, or after the checkpoint that delayed it
LONGEST = 9.5  # seconds after a signal, however long a checkpoint takes
FLUSH = 0.2  # seconds to write what is buffered: nothing may read the pipe
WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
STOP = b"\0"  # no signal has this number


class Terminated(BaseException):
    """SIGTERM was received. It is raised in the main thread, so that `finally` deletes temporary files."""


class _Watch:
    """The signals of this process, and what delays them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.delays = 0  # checkpoints that are being written, by any thread
        self.holding = 0  # of them those of the main thread, which holds SIGTERM back
        self.raised = self.pending = False
        self.survives = 0  # contexts in which SIGINT does not end the verb

    def on_sigterm(self, number: int, frame: FrameType | None) -> None:
        """Raise Terminated, once: a second one would interrupt the deletion of temporary files."""
        self.pending = True
        self.raise_pending()

    def raise_pending(self) -> None:
        if self.pending and not self.raised and not self.holding:
            self.raised = True
            raise Terminated

    def watch(self, reader: int, stopped: threading.Event) -> None:
        """Wait for a signal that ends the verb; end the process if it has not ended in time."""
        while (data := os.read(reader, 64)) and STOP not in data:
            numbers = [n for n in data if n == signal.SIGTERM or (n == signal.SIGINT and not self.survives)]
            if numbers and not self._ends_by_itself(stopped):
                end_now(numbers[0])

    def _ends_by_itself(self, stopped: threading.Event) -> bool:
        begin = time.monotonic()
        end = begin + SOON
        while time.monotonic() < min(end, begin + LONGEST):
            if stopped.wait(0.02):
                return True
            if self.delays:
                end = time.monotonic() + SOON
        return False


_watch = _Watch()


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Within this context SIGTERM and SIGINT end the process within two seconds. In another thread than the main one, which
    cannot handle signals, nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _watch.raised = _watch.pending = False
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    stopped = threading.Event()
    thread = threading.Thread(target=_watch.watch, args=(reader, stopped), name="signals", daemon=True)
    thread.start()
    handler = signal.signal(signal.SIGTERM, _watch.on_sigterm)
    wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        signal.signal(signal.SIGTERM, handler)
        stopped.set()
        os.write(writer, STOP)
        thread.join()
        os.close(reader)
        os.close(writer)


@contextlib.contextmanager
def delaying() -> Iterator[None]:
    """Let a signal wait for this context, a checkpoint that is being written: at most LONGEST."""
    main = threading.current_thread() is threading.main_thread()
    with _watch.lock:
        _watch.delays += 1
        _watch.holding += main
    try:
        yield
    finally:
        with _watch.lock:
            _watch.delays -= 1
            _watch.holding -= main
    if main:
        _watch.raise_pending()


@contextlib.contextmanager
def surviving_interrupts() -> Iterator[None]:
    """Within this context SIGINT does not end the verb: it ends an answer, or a line that is being typed."""
    _watch.survives += 1
    try:
        yield
    finally:
        _watch.survives -= 1


def end_now(number: int) -> NoReturn:
    """Kill the children, write what is buffered, and end the process with 128 + the signal's number."""
    end_children()
    writer = threading.Thread(target=_write_last, args=(WORDS[signal.Signals(number)],), daemon=True)
    writer.start()
    writer.join(FLUSH)
    os._exit(128 + number)


def _write_last(word: str) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # a closed stream, a full disk
            stream.flush()
    with contextlib.suppress(OSError):
        os.write(2, f"dovetail: {word}\n".encode())


def end_children() -> None:
    """Kill every process that this one has started, and theirs: ranks, workers, compilers, engines."""
    parents: dict[int, list[int]] = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        if name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):  # it has just ended
                parent = int(Path("/proc", name, "stat").read_text().rpartition(")")[2].split()[1])
                parents.setdefault(parent, []).append(int(name))
    queue = parents.get(os.getpid(), [])
    while queue:
        child = queue.pop()
        queue += parents.get(child, [])
        with contextlib.suppress(OSError):
            os.kill(child, signal.SIGKILL)


def _forget_in_child() -> None:
    """In a forked child: a signal of its own must not reach the watch of its parent."""
    with contextlib.suppress(ValueError):
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forget_in_child)


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
