"""Pair: a few ranks in persistent processes that run one job after another.

    with Pair() as pair:
        first, second = pair.run(job, "some", "plain data")        # job(*data) on both ranks at once; the result of each

Starting a rank imports torch, which takes seconds; a job on running ranks costs milliseconds. A job is a function of a module
that the ranks can import; arguments and results are plain data. Ranks communicate by gloo on this machine, one thread each.
A rank that raises, dies or times out ends the whole pair with an error that names the rank and the cause; the next job starts
a new pair.
"""

from __future__ import annotations

import multiprocessing as mp
import tempfile
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist

from dovetail.base.extensions import load_parts, loaded
from dovetail.parallel.mesh import RankError

START = 120.0  # seconds a rank may take to start
DIED = "died with exit code"
GRACE = 5.0  # seconds the other ranks get once one has failed, and all ranks get to exit


class Pair:
    """Ranks that wait for jobs; two by default. `main` is what each rank runs, with the arguments of `serve`."""

    def __init__(self, ranks: int = 2, timeout: float = 120.0, main: Callable[..., None] | None = None) -> None:
        self.ranks, self.timeout, self.main = ranks, timeout, main or serve
        self.processes: list[BaseProcess] = []
        self.lines: list[Connection] = []
        self.meeting: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Pair:
        self.start()
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            self.close()
        else:  # a signal, perhaps: the ranks may be in a job
            self._kill()

    def start(self) -> None:
        """Start the ranks and wait for the process group; do nothing if they run."""
        if self.processes:
            return
        self.meeting = tempfile.TemporaryDirectory(prefix="dovetail-ranks-")
        meeting = str(Path(self.meeting.name) / "store")
        context = mp.get_context("spawn")
        for rank in range(self.ranks):
            line, far_end = context.Pipe()
            arguments = (far_end, meeting, rank, self.ranks, self.timeout, loaded())
            process = context.Process(target=self.main, args=arguments, daemon=True)
            process.start()
            far_end.close()
            self.processes.append(process)
            self.lines.append(line)
        self._answers(START, "starting")

    def run(self, job: Callable[..., Any], *data: Any, timeout: float | None = None) -> list[Any]:
        """Run job(*data) on every rank at once; return the results in rank order."""
        self.start()
        try:
            for line in self.lines:
                line.send((job, data))
        except OSError as gone:
            self._kill()
            raise RankError(f"a rank was gone before {job.__name__} could begin") from gone
        return self._answers(self.timeout if timeout is None else timeout, job.__name__)

    def close(self) -> None:
        """Stop the ranks; terminate those that do not exit."""
        for line in self.lines:
            try:
                line.send(None)
            except OSError:
                continue  # it has exited already
        self._kill(GRACE)

    def _answers(self, timeout: float, what: str) -> list[Any]:
        """Return one result per rank, or raise for the first failure."""
        answers: dict[int, Any] = {}
        failed: dict[int, str] = {}
        until = monotonic() + timeout
        while len(answers) + len(failed) < self.ranks:
            waiting = [r for r in range(self.ranks) if r not in answers and r not in failed]
            ready = wait([self.lines[r] for r in waiting], max(0.0, until - monotonic()))
            if not ready:
                break
            for rank in waiting:
                if self.lines[rank] not in ready:
                    continue
                try:
                    fine, answer = self.lines[rank].recv()
                except (EOFError, OSError):
                    self.processes[rank].join(GRACE)
                    fine, answer = False, f"{DIED} {self.processes[rank].exitcode}"
                if fine:
                    answers[rank] = answer
                else:
                    failed[rank] = answer
                    until = min(until, monotonic() + GRACE)  # the others may wait for it without end
        if len(answers) == self.ranks:
            return [answers[rank] for rank in range(self.ranks)]
        self._kill()
        if not failed:
            silent = [rank for rank in range(self.ranks) if rank not in answers]
            raise RankError(f"{what}: no answer from rank {', '.join(map(str, silent))} within {timeout:g} s")
        # a rank that died is the cause; one that raised may only have waited for it
        causes = sorted(failed.items(), key=lambda item: not item[1].startswith(DIED))
        raise RankError(f"{what}: " + "; ".join(f"rank {rank} {why}" for rank, why in causes))

    def _kill(self, grace: float = 0.0) -> None:
        for process in self.processes:
            process.join(grace)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        for line in self.lines:
            line.close()
        self.processes, self.lines = [], []
        if self.meeting is not None:
            self.meeting.cleanup()
            self.meeting = None


def serve(line: Connection, meeting: str, rank: int, ranks: int, timeout: float, load: Sequence[str] = ()) -> None:
    """The main loop of one rank: load the parts of --load, join the process group, then run jobs until stopped."""
    load_parts(load)
    torch.set_num_threads(1)
    store = dist.FileStore(meeting, ranks)  # pyright: ignore[reportPrivateImportUsage]  documented, if not listed
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout))
    line.send((True, None))
    while (job := _next(line)) is not None:
        function, data = job
        try:
            answer = (True, function(*data))
        except Exception:  # any exception is reported to the process that sent the job
            answer = (False, f"raised\n{traceback.format_exc()}")
        line.send(answer)
    dist.destroy_process_group()


def _next(line: Connection) -> Any:
    try:
        return line.recv()
    except EOFError:  # the parent process has exited
        return None
