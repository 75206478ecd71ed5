"""Executors: run a function on the units of a build, in this process, in a pool of processes, or on a cluster (cluster.py)."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from typing import Any

from dovetail.core.errors import ResourceError


class Executor(ABC):
    """Where the units of a build are worked on."""

    @abstractmethod
    def run(self, work: Callable[[int], Any], numbers: Sequence[int]) -> Iterator[int]:
        """Call `work(number)` for each number, and yield each when it is done, in any order. The first error ends all."""


class InProcess(Executor):
    """One unit after the other, in this process."""

    def run(self, work: Callable[[int], Any], numbers: Sequence[int]) -> Iterator[int]:
        for number in numbers:
            work(number)
            yield number


class ProcessPool(Executor):
    """Units in parallel, in processes that are spawned: none of them inherits threads or locks."""

    def __init__(self, workers: int) -> None:
        self.workers = workers

    def run(self, work: Callable[[int], Any], numbers: Sequence[int]) -> Iterator[int]:
        workers = min(self.workers, len(numbers))
        if workers <= 1:
            yield from InProcess().run(work, numbers)
            return
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(workers, mp_context=context, initializer=start_worker)
        try:
            futures = {pool.submit(work, number): number for number in numbers}
            for future in as_completed(futures):
                future.result()
                yield futures[future]
        except BrokenProcessPool as error:
            raise ResourceError(
                "a worker process was ended, often for lack of memory; finished shards are kept: run the same command again, "
                "with fewer --workers (in a script, call build_data under `if __name__ == '__main__':`)"
            ) from error
        except BaseException:
            for process in list(pool._processes.values()):  # their units are written as a whole or not at all
                process.terminate()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def start_worker() -> None:
    """Prepare a worker: it leaves Ctrl-C to its parent, ends with it, and encodes in one thread."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=end_with_parent, daemon=True).start()


def end_with_parent() -> None:
    """End this process when the one that started it has ended, however it did."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def available_workers() -> int:
    """Return the number of processors that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return os.cpu_count() or 1
