"""The runs of a lab as tasks on the nodes of a Ray cluster (extra `cluster`), each with a number of processors.

Every node sees the working directory, the data and the directory of the lab under the same paths, on a shared file system, and
has this version of Dovetail. The run of a node that is lost is resumed on another one. Ray moves arguments between processes
as pickles, so a cluster must be as trusted as the machine that starts the lab.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from dovetail.base.errors import DovetailError
from dovetail.data.executors import RETRIES, connect_to_cluster, ray_module
from dovetail.experiments.pool import RunPool, WorkerEnded
from dovetail.experiments.worker import train_function, train_one


class ClusterPool(RunPool):
    """Tasks on the nodes; `address` is that of the head node (host:port), or "auto". By default as many as processors allow."""

    def __init__(self, train: Callable[..., Any], workers: int | None, threads: int, address: str) -> None:
        self.function, self.threads = f"{train.__module__}:{train.__qualname__}", threads
        self.ray = ray_module()
        self.started = not self.ray.is_initialized()
        if self.started:
            connect_to_cluster(address)
        self.workers = workers or max(1, int(self.ray.cluster_resources().get("CPU", 1)) // threads)
        self.task = self.ray.remote(num_cpus=threads, max_retries=RETRIES)(train_on_node)
        self.pending: dict[Any, Path] = {}  # by the reference of a task
        self.nodes = Counter[str]()  # runs per node

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for task in self.pending:
            self.ray.cancel(task, force=True)
        if self.started:
            self.ray.shutdown()

    @property
    def free(self) -> int:
        return self.workers - len(self.pending)

    def start(self, place: Path, arguments: Mapping[str, Any]) -> None:
        task = self.task.remote(self.function, str(place), dict(arguments), self.threads, os.getcwd())
        self.pending[task] = place

    def wait(self, seconds: float) -> Path | None:
        done, _ = self.ray.wait(list(self.pending), num_returns=1, timeout=seconds)
        if not done:
            return None
        place = self.pending.pop(done[0])
        try:
            node, problem = self.ray.get(done[0])
        except self.ray.exceptions.RayError as error:
            reason = str(error).strip().splitlines()[0][:200]
            raise WorkerEnded(f"{place.name}: the cluster failed ({reason}); run the same command again") from error
        if problem is not None:
            raise DovetailError(f"{place.name}: {problem}")
        self.nodes[node] += 1
        return place


def train_on_node(function: str, place: str, arguments: dict[str, Any], threads: int, directory: str) -> tuple[str, str | None]:
    """Train a run on this node; return the node, and the problem of the run."""
    import torch

    os.chdir(directory)  # paths of the data are relative to it
    torch.set_num_threads(threads)
    problem = None
    try:
        train_one(train_function(function), Path(place), arguments)
    except DovetailError as error:
        problem = str(error)
    return ray_module().get_runtime_context().get_node_id(), problem
