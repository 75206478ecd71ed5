"""Executors: run a function on the units of a build, in this process, in a pool of processes, or on a Ray cluster.

Units are the same everywhere, and so is the result. Every node of a cluster must see the inputs and the output under the same
paths, on a shared file system, and have this version of Dovetail installed (extra `cluster`). A unit whose node is lost runs
again on another one: its files appear as a whole or not at all. Ray moves functions between its processes as pickles, so a
cluster must be as trusted as the machine that starts the build.
"""

from __future__ import annotations

import collections
import importlib
import multiprocessing
import os
import signal
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from typing import Any

from dovetail.base.errors import DovetailError, FileError, ResourceError, install_command


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


# -- a cluster --------------------------------------------------------------------------------------------------------


AUTO = "auto"  # the cluster that runs on this machine
SECONDS = 10.0  # until a connection is refused
RETRIES = 5  # of a unit whose worker or node was lost


class RayCluster(Executor):
    """Units as tasks of one processor each; `address` is that of the head node (host:port), or "auto"."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.nodes = collections.Counter[str]()  # units per node

    def run(self, work: Callable[[int], Any], numbers: Sequence[int]) -> Iterator[int]:
        ray = ray_module()
        started = not ray.is_initialized()
        try:
            if started:
                connect_to_cluster(self.address)
            task = ray.remote(num_cpus=1, max_retries=RETRIES)(_run)
            pending = {task.remote(work, number): number for number in numbers}
            while pending:
                (done,), _ = ray.wait(list(pending), num_returns=1)
                self.nodes[ray.get(done)] += 1
                yield pending.pop(done)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, DovetailError):
                raise error.cause from None
            raise
        except ray.exceptions.RayError as error:
            problem = str(error).strip().splitlines()[0][:200]
            raise ResourceError(f"{self.address}: the cluster failed ({problem}); run the same command again") from error
        finally:
            if started and ray.is_initialized():
                ray.shutdown()


def connect_to_cluster(address: str) -> None:
    """Connect to the cluster. Ray itself tries for minutes to reach an address where nothing listens."""
    try:
        if address != AUTO:
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), SECONDS).close()
        ray_module().init(address=address, log_to_driver=False, logging_level="error")
    except (OSError, ValueError, OverflowError, RuntimeError) as error:
        remedy = "give the host:port of a head node that runs (`ray start --head`), or auto"
        raise ResourceError(f"--cluster {address}: cannot be reached ({str(error)[:200]}); {remedy}") from error


def _run(work: Callable[[int], Any], number: int) -> str:
    """Work on a unit; return the node."""
    work(number)
    return ray_module().get_runtime_context().get_node_id()


def ray_module() -> Any:
    """The module `ray`; FileError where the extra is not installed."""
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise FileError(f"--cluster: a cluster is reached through ray: {install_command('cluster')}") from None
