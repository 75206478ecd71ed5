"""SIGKILL for a lab and for the processes that train its runs, each while runs are in the middle."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from os import kill
from pathlib import Path


def kill_repeatedly(command: Sequence[str], runs: Path, victims: Sequence[str]) -> Counter[str]:
    """Run a lab to its end and kill it, or one process of its, after every run or two; return how often each was killed. A lab
    that was killed is started again. `runs` is the directory of its runs."""
    draw, kills, left = random.Random(0), Counter[str](), list(victims)
    process = subprocess.Popen(command)
    while process.poll() is None:
        until = _finished(runs) + draw.randint(0, 1)
        while process.poll() is None and (_finished(runs) < until or not _children(process.pid)):
            time.sleep(0.05)
        time.sleep(draw.uniform(0, 0.3))
        if not left:
            process.wait()
        elif process.poll() is None and left[0] == "lab":
            kills[left.pop(0)] += 1
            process.kill()
            process.wait()
            process = subprocess.Popen(command)
        elif children := _children(process.pid):
            with suppress(ProcessLookupError):
                kill(draw.choice(children), signal.SIGKILL)
                kills[left.pop(0)] += 1
    assert process.returncode == 0
    return kills


def _finished(runs: Path) -> int:
    return len(list(runs.glob("*.json")))


def _children(process: int) -> list[int]:
    """The processes of a lab that train."""
    with suppress(OSError):
        return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    return []
