"""What a rank does when its launcher or another rank is lost: it ends, and so do all ranks on its machine.

    the launcher is killed       every rank ends within POLL seconds; without a launcher it would keep the lock of its run
    a rank dies, hangs or stops  a collective of every other rank fails, at the latest after the time-out of the group:
                                 stacks on stderr → GRACE seconds for the others to end → SIGABRT, by which a rank that
                                 hangs writes the stacks of its threads → SIGKILL

A launcher alone is slow: torchrun waits 30 s for a rank that is stopped. Ranks are signalled by pidfd, never by a number that
another process may have by now; where a system has none (not Linux), this is left to the launcher.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch.distributed as dist

from dovetail.dist.mesh import RankError

POLL = 0.5  # seconds between two looks at the launcher
GRACE = 2.0  # seconds for other ranks to end by themselves: one that raised an error is about to print it
ABORT = 2.0  # seconds for a rank to write its stacks
GLOO = "gloo/transport"  # gloo raises RuntimeError with the place in its source


@contextlib.contextmanager
def ends_with_others(timeout: float) -> Iterator[None]:
    """Within this context, on every rank of the default group: a lost launcher ends the process, and a lost rank raises
    RankError once no other rank on this machine is alive. `timeout` is that of the group, for the message."""
    enabled = faulthandler.is_enabled()
    faulthandler.enable()
    peers, left = _peers(), threading.Event()
    threading.Thread(target=_end_with_launcher, args=(os.getppid(), left), name="launcher", daemon=True).start()
    try:
        yield
    except RuntimeError as error:
        if not (isinstance(error, dist.DistError) or GLOO in str(error)):
            raise
        traceback.print_exception(error)
        sys.stderr.flush()
        faulthandler.dump_traceback()  # of the other threads
        _end(peers)
        cause = str(error).strip().splitlines()[0]
        problem = f"another rank died, or did not answer within {timeout:g} s (--timeout)"
        raise RankError(f"rank {os.environ.get('RANK', '?')}: {problem}: {cause}; the same command resumes the run") from error
    finally:
        left.set()
        for peer in peers:
            os.close(peer)
        if not enabled:
            faulthandler.disable()


def _end_with_launcher(launcher: int, left: threading.Event) -> None:
    while not left.wait(POLL):
        if os.getppid() != launcher:
            with contextlib.suppress(OSError):  # nobody reads stderr any more
                os.write(2, b"dovetail: the launcher of this rank has ended, and so does the rank\n")
            os._exit(1)


def _peers() -> list[int]:
    """A pidfd of every other rank on this machine."""
    if not sys.platform.startswith("linux"):
        return []
    own = (_machine(), os.getpid())
    ranks: list[tuple[str, int]] = [own] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    return [os.pidfd_open(pid) for machine, pid in ranks if machine == own[0] and pid != own[1]]


def _machine() -> str:
    """The machine, and the namespace in which a process id means the same."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text(encoding='ascii')} {os.readlink('/proc/self/ns/pid')}"


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
