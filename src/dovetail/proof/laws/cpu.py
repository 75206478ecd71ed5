"""CPU time of a process with everything that it started: the ranks of a sharded model, the workers of a compiler."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from pathlib import Path

PROCESSES = Path("/proc")  # of Linux; elsewhere only children that have ended are counted


def cpu_seconds() -> float:
    """The CPU time so far of this process, of its children that have ended, and of every descendant that runs."""
    times = os.times()
    return time.process_time() + times.children_user + times.children_system + _descendants()


def _descendants() -> float:
    children: dict[int, list[tuple[int, float]]] = defaultdict(list)  # by parent: (process, its seconds)
    for path in PROCESSES.glob("[0-9]*/stat"):
        try:
            _, _, rest = path.read_text(encoding="utf-8", errors="replace").rpartition(")")  # the name may hold anything
        except OSError:
            continue  # it has ended
        fields = rest.split()
        ticks = sum(map(int, fields[11:15]))  # utime, stime, and those of its children that have ended
        children[int(fields[1])].append((int(path.parent.name), ticks / os.sysconf("SC_CLK_TCK")))
    total, below = 0.0, [os.getpid()]
    while below:
        for process, seconds in children[below.pop()]:
            total += seconds
            below.append(process)
    return total
