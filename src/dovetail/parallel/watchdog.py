"""What a rank does when its launcher or another rank is lost: it ends, and so do all ranks on its machine.

    the launcher is killed       every rank ends within POLL seconds; without a launcher it would keep the lock of its run
    a rank dies, hangs or stops  a collective of every other rank fails, at the latest after the time-out of the group:
                                 stacks on stderr → all ranks answer what they do (parallel/heartbeat.py), and the one that did
                                 not arrive is named → GRACE seconds for the others to end → SIGABRT, by which a rank that hangs
                                 writes the stacks of its threads → SIGKILL

A launcher alone is slow: torchrun waits 30 s for a rank that is stopped. Ranks are signalled by pidfd, never by a number that
another process may have by now; where a system has none (not Linux), this is left to the launcher.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from dovetail.parallel.heartbeat import Heartbeat, Member, Status, member, named, problem, stacks_of
from dovetail.parallel.mesh import DUMPS, RankError

POLL = 0.5  # seconds between two looks at the launcher
GRACE = 2.0  # seconds for other ranks to end by themselves: one that raised an error is about to print it
ABORT = 2.0  # seconds for a rank to write its stacks
GLOO = "gloo/transport"  # gloo raises RuntimeError with the place in its source
T = TypeVar("T")
UNKNOWN = "another rank died, or did not arrive"


@contextlib.contextmanager
def ends_with_others(timeout: float, status: Status | None = None) -> Iterator[list[Member]]:
    """Within this context, on every rank of the default group: a lost launcher ends the process, and a lost rank raises
    RankError, which names it, once no other rank on this machine hangs. `timeout` is that of the group; `status` is what
    this rank does. Yields the process of each rank."""
    enabled = faulthandler.is_enabled()
    faulthandler.enable()
    members, key = _members()
    peers, left = _peers(members), threading.Event()
    heartbeat = Heartbeat(status or Status(), timeout, key)
    threading.Thread(target=_end_with_launcher, args=(os.getppid(), left), name="launcher", daemon=True).start()
    try:
        yield members
    except RuntimeError as error:
        if not (isinstance(error, dist.DistError) or GLOO in str(error)):
            _within(heartbeat.patience, functools.partial(_answer, heartbeat, "ended", error))
            raise
        traceback.print_exception(error)
        sys.stderr.flush()
        faulthandler.dump_traceback()  # of the other threads
        cause = str(error).strip().splitlines()[0]
        lost = _within(4 * heartbeat.patience, functools.partial(_lost, heartbeat, members, error)) or LostRanks(UNKNOWN)
        _end([peer for rank, peer in peers.items() if rank not in lost.ending])
        where = f"{named(heartbeat.rank, members)}: {lost.problem}, within {timeout:g} s (--timeout)"
        raise RankError(f"{where}: {cause}{_dumps()}; the same command resumes the run") from error
    except BaseException as error:
        _within(heartbeat.patience, functools.partial(_answer, heartbeat, "ended", error))
        raise
    finally:
        heartbeat.stop()
        left.set()
        for peer in peers.values():
            os.close(peer)
        if not enabled:
            faulthandler.disable()


class LostRanks(NamedTuple):
    """Which ranks did not arrive, and which ranks end by themselves, since their collective failed, too."""

    problem: str
    ending: Sequence[int] = ()


def _within(seconds: float, action: Callable[[], T]) -> T | None:
    """The result of an action in a thread of its own; None where it is not there in time: a store on a host that is lost may
    never answer."""
    result = list[T]()
    thread = threading.Thread(target=lambda: result.append(action()), name="store", daemon=True)
    thread.start()
    thread.join(seconds)
    return result[0] if result else None


def _answer(heartbeat: Heartbeat, state: str, error: BaseException) -> None:
    with contextlib.suppress(RuntimeError):  # the store has ended
        heartbeat.answer(state, f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}")


def _lost(heartbeat: Heartbeat, members: Sequence[Member], error: RuntimeError) -> LostRanks:
    """Find which ranks did not arrive: the first rank that asks writes their stacks to stderr; the others read its report."""
    _answer(heartbeat, "failed", error)
    try:
        answers = heartbeat.ask()
        if answers is None:
            return LostRanks(**heartbeat.reported())
        ending = [rank for rank, one in enumerate(answers) if one["state"] == "failed"]
        lost = LostRanks(problem(answers, members), ending)
        heartbeat.report(lost._asdict())
    except RuntimeError as unreachable:
        return LostRanks(f"the store of the ranks does not answer ({str(unreachable).strip().partition(chr(10))[0]})")
    with contextlib.suppress(OSError):
        sys.stderr.write(f"dovetail: {lost.problem}\n{stacks_of(answers, members)}")
        sys.stderr.flush()
    return lost


def _dumps() -> str:
    """Where torch writes what its flight recorder has of collectives, which NCCL alone does by itself."""
    path = os.environ.get(DUMPS)
    return "" if path is None else f"; the flight recorder of rank R is in {path}R on its host"


def _end_with_launcher(launcher: int, left: threading.Event) -> None:
    while not left.wait(POLL):
        if os.getppid() != launcher:
            with contextlib.suppress(OSError):  # nobody reads stderr any more
                os.write(2, b"dovetail: the launcher of this rank has ended, and so does the rank\n")
            os._exit(1)


def _members() -> tuple[list[Member], str]:
    """The process of every rank, and a key that no earlier group of ranks had."""
    own = (member(), time.time_ns())
    ranks: list[tuple[Member, int]] = [own] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    return [one for one, _ in ranks], str(ranks[0][1])


def _peers(members: Sequence[Member]) -> dict[int, int]:
    """Rank -> pidfd of every other rank on this machine."""
    own = member()
    near = {rank: one.pid for rank, one in enumerate(members) if one.machine == own.machine != ""}
    return {rank: os.pidfd_open(pid) for rank, pid in near.items() if pid != own.pid}


def _end(peers: Sequence[int]) -> None:
    for seconds, signals in ((GRACE, (signal.SIGABRT, signal.SIGCONT)), (ABORT, (signal.SIGKILL,))):
        until = time.monotonic() + seconds
        for peer in [one for one in peers if not _has_ended(one, until - time.monotonic())]:
            for number in signals:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(peer, number)


def _has_ended(peer: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(peer, select.POLLIN)
    return bool(poll.poll(max(0.0, seconds) * 1000))
