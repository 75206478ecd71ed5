"""A pool of local processes, each with a number of threads, that train the runs of a lab.

A process that ends by itself (killed, out of memory) is started again, and its run is resumed; the third end of one run is an
error.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from dovetail.base.errors import DovetailError

TRIES = 3  # of a run whose process ends
ENDS = 5.0  # seconds that a process has to end by itself
TAIL = 2000  # bytes of the log in an error
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class WorkerEnded(DovetailError):
    """A run whose process ended several times."""


class RunPool(ABC):
    """`with WorkerPool(train, 2, 1, logs) as pool: pool.start(place, arguments); place = pool.wait(1.0)`."""

    workers: int  # runs that are trained at the same time

    def __enter__(self) -> Self:
        return self

    @abstractmethod
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End what still trains."""

    @property
    @abstractmethod
    def free(self) -> int:
        """The number of runs that could be started."""

    @abstractmethod
    def start(self, place: Path, arguments: Mapping[str, Any]) -> None:
        """Train a run in a directory."""

    @abstractmethod
    def wait(self, seconds: float) -> Path | None:
        """Return the directory of a run that is complete; None if none is after these seconds. Raises what a run raised."""


class WorkerAnswer(NamedTuple):
    """What a process said: a run that is complete, or the problem of one; None: it has ended."""

    worker: int
    process: subprocess.Popen[str]
    line: str | None


class WorkerPool(RunPool):
    """Processes of this machine."""

    def __init__(self, train: Callable[..., Any], workers: int, threads: int, logs: Path) -> None:
        self.function, self.threads, self.logs = f"{train.__module__}:{train.__qualname__}", threads, logs
        self.answers: queue.Queue[WorkerAnswer] = queue.Queue()
        self.processes: dict[int, subprocess.Popen[str]] = {}
        self.running: dict[int, tuple[Path, Mapping[str, Any]]] = {}  # by worker
        self.workers, self.ends = workers, Counter[Path]()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for process in self.processes.values():
            if process.stdin is not None:
                process.stdin.close()
        for process in self.processes.values():
            try:
                process.wait(ENDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    @property
    def free(self) -> int:
        return self.workers - len(self.running)

    @property
    def places(self) -> set[Path]:
        """The directories of the runs that are being trained."""
        return {place for place, _ in self.running.values()}

    def start(self, place: Path, arguments: Mapping[str, Any]) -> None:
        worker = next(number for number in range(self.workers) if number not in self.running)
        if worker not in self.processes:
            self.processes[worker] = self._spawn(worker)
        self.running[worker] = place, arguments
        process = self.processes[worker]
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps({"place": str(place), "arguments": dict(arguments)}) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass  # its end is an answer

    def wait(self, seconds: float) -> Path | None:
        try:
            answer = self.answers.get(timeout=seconds)
        except queue.Empty:
            return None
        if self.processes.get(answer.worker) is not answer.process:
            return None  # of a process that was replaced
        if answer.line is None:
            self._ended(answer)
            return None
        data = json.loads(answer.line)
        place, _ = self.running.pop(answer.worker)
        if data["problem"] is not None:
            raise DovetailError(f"{place.name}: {data['problem']}")
        return place

    def _ended(self, answer: WorkerAnswer) -> None:
        """Start the process of a run again."""
        code = answer.process.wait()
        del self.processes[answer.worker]
        place, arguments = self.running.pop(answer.worker, (None, {}))
        if place is None:
            return
        self.ends[place] += 1
        if self.ends[place] >= TRIES:
            with self._log(answer.worker).open("rb") as log:
                log.seek(max(0, os.fstat(log.fileno()).st_size - TAIL))
                tail = log.read().decode(errors="replace").strip().splitlines()
            last = f"; its log ends with: {tail[-1]}" if tail else ""
            raise WorkerEnded(f"{place.name}: its process ended {TRIES} times, at last with {code}{last}")
        self.start(place, arguments)

    def _log(self, worker: int) -> Path:
        return self.logs / f"worker-{worker}.log"

    def _spawn(self, worker: int) -> subprocess.Popen[str]:
        environment = {**os.environ, **dict.fromkeys(THREADS, str(self.threads))}
        command = [sys.executable, "-m", "dovetail.experiments.worker", self.function]
        with self._log(worker).open("ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
                start_new_session=True,  # Ctrl-C is the lab's
            )
        threading.Thread(target=self._read, args=(worker, process), daemon=True).start()
        return process

    def _read(self, worker: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.answers.put(WorkerAnswer(worker, process, line))
        self.answers.put(WorkerAnswer(worker, process, None))
