"""RayCluster: the units of a build on the nodes of a Ray cluster (extra `cluster`).

Units are the same as on one machine, and so is the result. Every node must see the inputs and the output under the same paths,
on a shared file system, and have this version of Dovetail installed. A unit whose node is lost runs again on another one: its
files appear as a whole or not at all. Ray moves functions between its processes as pickles, so a cluster must be as trusted as
the machine that starts the build.
"""

from __future__ import annotations

import collections
import importlib
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dovetail.core.errors import DovetailError, FileError, ResourceError, install_command
from dovetail.data.executors import Executor

AUTO = "auto"  # the cluster that runs on this machine
SECONDS = 10.0  # until a connection is refused
RETRIES = 5  # of a unit whose worker or node was lost


class RayCluster(Executor):
    """Units as tasks of one processor each; `address` is that of the head node (host:port), or "auto"."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.nodes = collections.Counter[str]()  # units per node

    def run(self, work: Callable[[int], Any], numbers: Sequence[int]) -> Iterator[int]:
        ray = _ray()
        started = not ray.is_initialized()
        try:
            if started:
                self._connect(ray)
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

    def _connect(self, ray: Any) -> None:
        """Connect to the cluster. Ray itself tries for minutes to reach an address where nothing listens."""
        try:
            if self.address != AUTO:
                host, _, port = self.address.rpartition(":")
                socket.create_connection((host, int(port)), SECONDS).close()
            ray.init(address=self.address, log_to_driver=False, logging_level="error")
        except (OSError, ValueError, OverflowError, RuntimeError) as error:
            remedy = "give the host:port of a head node that runs (`ray start --head`), or auto"
            raise ResourceError(f"--cluster {self.address}: cannot be reached ({str(error)[:200]}); {remedy}") from error


def _run(work: Callable[[int], Any], number: int) -> str:
    """Work on a unit; return the node."""
    work(number)
    return _ray().get_runtime_context().get_node_id()


def _ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise FileError(f"--cluster: a cluster is reached through ray: {install_command('cluster')}") from None
