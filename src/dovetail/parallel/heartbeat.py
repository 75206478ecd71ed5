"""What each rank does, published to the store of the ranks, and the answers of all ranks when a collective has failed.

    status/R    host, process, step, phase                       set every few seconds by a thread of rank R
    asked       the number of ranks whose collective failed      the first of them collects the answers and sets `report`
    answer/R    the collective that rank R waits in, if any (torch's flight recorder), and the stacks of its threads

A rank that is stopped, dead, unreachable or inside native code that keeps Python's lock does not answer: its last status says
where it was. Where native code keeps the lock for the whole time-out, faulthandler writes the stacks to the rank's stderr.
The answers tell which rank did not arrive:

    waiting   in a collective: not the cause
    failed    its collective also failed: not the cause
    ended     by an error of its own, before the collective
    silent    stopped, dead, unreachable, or in native code
    running   somewhere else: in its data, on a disk, in an endless loop

Silent and ended ranks are the cause where there are any: meanwhile another rank may be on its way. Without any cause the ranks
wait in different collectives.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.distributed_c10d import _get_default_store

BEATS = 20  # beats per time-out …
LONGEST_BEAT = 5.0  # … but one in so many seconds: a thousand ranks send 200 per second
ANSWERS = 3.0  # seconds for the answers, at least
FRAMES, THREADS = 40, 8  # of the stacks of a rank
COMMUNICATION = (os.path.dirname(dist.__file__), os.path.dirname(__file__))  # whose code sends and receives
WATCHING = ("heartbeat", "launcher")  # threads that watch the others
RECORDERS = {"gloo": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}  # of torch's flight recorder, by backend


class Member(NamedTuple):
    """A rank as a process: the name of its host, the machine and namespace of its process id, and the id."""

    host: str
    machine: str
    pid: int


class Status:
    """What this rank does now: `status.at("data", 12)`. Other ranks read it when this one does not arrive."""

    def __init__(self) -> None:
        self.now: tuple[str, int | None, float] = ("start", None, time.monotonic())

    def at(self, phase: str, step: int | None = None) -> None:
        """Enter a phase, of a step counted from 1."""
        self.now = (phase, step, time.monotonic())

    def data(self) -> dict[str, Any]:
        """The status as plain data."""
        phase, step, since = self.now
        return {"phase": phase, "step": step, "seconds": time.monotonic() - since}


class Heartbeat:
    """Publishes the status of this rank of the default group, and asks all ranks for theirs. `key` is the same on all ranks,
    and that of no earlier group."""

    def __init__(self, status: Status, timeout: float, key: str) -> None:
        self.status, self.timeout, self.key = status, timeout, key
        self.rank, self.count, self.backend = dist.get_rank(), dist.get_world_size(), dist.get_backend()
        self.beat = min(LONGEST_BEAT, timeout / BEATS)
        self.patience = max(ANSWERS, 3 * self.beat)
        self.left, self.answering, self.answered = threading.Event(), threading.Lock(), False
        self.thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """End the thread."""
        self.left.set()
        self.thread.join(self.beat)
        faulthandler.cancel_dump_traceback_later()

    def answer(self, state: str, cause: str = "") -> None:
        """Publish the last words of this rank, once: `state` is running, waiting (in a collective), failed (a collective of
        this rank did) or ended (by an error of its own)."""
        with self.answering:
            if self.answered:
                return
            self.answered = True
            store = self._store()
            data = {**self.status.data(), "state": state, "cause": cause, "stacks": stacks()}
            store.set(self._name("answer", self.rank), json.dumps(data))
            store.add(self._name("answers"), 1)

    def ask(self) -> list[dict[str, Any]] | None:
        """Ask all ranks for an answer, after this rank has given its own. The status and answer of each rank: `state` is
        "silent" for one without an answer. None on every rank but the first that asks."""
        store = self._store()
        if store.add(self._name("asked"), 1) > 1:
            return None
        until = time.monotonic() + self.patience
        while store.add(self._name("answers"), 0) < self.count and time.monotonic() < until:
            time.sleep(self.beat / 4)
        return [self._found(store, rank) for rank in range(self.count)]

    def report(self, report: dict[str, Any]) -> None:
        """Publish who did not arrive, as plain data."""
        self._store().set(self._name("report"), json.dumps(report))

    def reported(self) -> dict[str, Any]:
        """What the rank that asked first has published; raises where it did not."""
        store = self._store()
        store.wait([self._name("report")], timedelta(seconds=2 * self.patience))
        return json.loads(store.get(self._name("report")))

    def _found(self, store: Store, rank: int) -> dict[str, Any]:
        result: dict[str, Any] = {"phase": "start", "step": None, "seconds": 0.0, "state": "silent", "cause": "", "stacks": ""}
        for name in (self._name("status", rank), self._name("answer", rank)):
            if store.check([name]):
                result |= json.loads(store.get(name))
        return result

    def _beat(self) -> None:
        try:
            store = self._store()
            while not self.left.wait(self.beat):
                faulthandler.dump_traceback_later(self.timeout)  # unless the next beat comes: written without Python's lock
                store.set(self._name("status", self.rank), json.dumps(self.status.data()))
                if not self.answered and store.check([self._name("asked")]):
                    waits = waiting_in(self.backend)
                    self.answer("running" if waits is None else "waiting", waits or "")
        except RuntimeError:  # the store has ended, with the launcher or the first rank: there is nobody to tell
            return

    def _store(self) -> Store:
        """A connection of its own: one that waits blocks every thread that shares it."""
        store = _get_default_store().clone()  # pyright: ignore[reportAttributeAccessIssue]  documented, if not in its stub
        store.set_timeout(timedelta(seconds=2 * self.patience))
        return store

    def _name(self, *parts: object) -> str:
        return "/".join(map(str, ("heartbeat", self.key, *parts)))


def member() -> Member:
    """This process."""
    machine = ""
    if sys.platform.startswith("linux"):
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            machine = f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    return Member(socket.gethostname(), machine, os.getpid())


def waiting_in(backend: str) -> str | None:
    """The oldest collective that this rank has begun and not finished, from torch's flight recorder; or the send or receive
    that its main thread is in, which gloo does not record."""
    dump = getattr(c10d, RECORDERS[backend], None)
    entries: list[dict[str, Any]] = [] if dump is None else json.loads(dump(True, True)).get("entries", [])
    active = next((entry for entry in entries if not entry["retired"]), None)
    if active is None:
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        return frame.f_code.co_name if any(room in frame.f_code.co_filename for room in COMMUNICATION) else None
    number = active["p2p_seq_id" if active["is_p2p"] else "collective_seq_id"]
    return f"{active['profiling_name']} number {number} of the group {active['process_group'][1] or active['process_group'][0]}"


def stacks() -> str:
    """The Python stacks of this process's threads, that of the main thread first, without those that watch it."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = {ident: frame for ident, frame in sys._current_frames().items() if names.get(ident) not in WATCHING}
    lines = list[str]()
    for ident, frame in sorted(frames.items(), key=lambda one: one[0] != main)[:THREADS]:
        lines.append(f"Thread {names.get(ident, ident)} (most recent call last):\n")
        lines += traceback.format_stack(frame)[-FRAMES:]
    return "".join(lines)


# -- which rank did not arrive ----------------------------------------------------------------------------------------


MOST = 8  # ranks that a message names
STATES = {
    "silent": "does not respond: it is stopped, dead, unreachable or in native code",
    "running": "runs outside every collective",
    "waiting": "waits in",
    "failed": "also failed",
    "ended": "ended with",
}


def missing(answers: Sequence[dict[str, Any]]) -> list[int]:
    """The ranks that did not arrive; none where every rank waits."""
    lost = [rank for rank, one in enumerate(answers) if one["state"] in ("silent", "ended")]
    return lost or [rank for rank, one in enumerate(answers) if one["state"] == "running"]


def named(rank: int, members: Sequence[Member]) -> str:
    """A rank with its host and process."""
    return f"rank {rank} ({members[rank].host}, process {members[rank].pid})"


def described(answer: dict[str, Any]) -> str:
    """Where a rank is, and for how long."""
    step = "before the first step" if answer["step"] is None else f"step {answer['step']}"
    where = f"{step}, phase {answer['phase']}, for {answer['seconds']:.0f} s"
    if answer["state"] == "silent":
        where = f"last seen at {step}, phase {answer['phase']}"
    return f"{where}: {STATES[answer['state']]}{' ' if answer['cause'] else ''}{answer['cause']}"


def problem(answers: Sequence[dict[str, Any]], members: Sequence[Member]) -> str:
    """Which ranks did not arrive, in one line."""
    lost = missing(answers)
    if not lost:
        waits = sorted({answer["cause"] for answer in answers if answer["state"] == "waiting"})
        if not waits:
            return "a collective failed on every rank, so a link between them may be broken"
        return f"no rank is missing, but they wait in different collectives ({'; '.join(waits[:MOST])})"
    return _listed(f"{named(rank, members)} did not arrive, {described(answers[rank])}" for rank in lost)


def stacks_of(answers: Sequence[dict[str, Any]], members: Sequence[Member]) -> str:
    """The stacks of the ranks that did not arrive, where they sent them."""
    lost = [rank for rank in missing(answers) if answers[rank]["stacks"]][:MOST]
    return "".join(f"The stacks of {named(rank, members)}:\n{answers[rank]['stacks']}" for rank in lost)


def _listed(lines: Iterable[str]) -> str:
    found = list(lines)
    rest = len(found) - MOST
    return "; ".join([*found[:MOST], *([f"and {rest} more ranks"] if rest > 0 else [])])
