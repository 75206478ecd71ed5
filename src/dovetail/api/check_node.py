"""check_node: test this machine before it joins a training run."""

from __future__ import annotations

import dataclasses as dc
import socket
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from dovetail.api.result import Result
from dovetail.parallel.node import NodeTest, node_tests
from dovetail.views.console import unwrapped


@dc.dataclass(frozen=True, repr=False)
class NodeReport(Result):
    """The tests of a node."""

    host: str
    tests: tuple[NodeTest, ...]

    @property
    def passed(self) -> bool:
        """Whether the node passed every test."""
        return all(test.passed for test in self.tests)

    def to_dict(self) -> dict[str, Any]:
        return {"host": self.host, "passed": self.passed, "tests": [test._asdict() for test in self.tests]}

    def view(self, width: int) -> RenderableType:
        verdict = "passed" if self.passed else "failed: keep this node out of the job"
        lines = [f"{'✓' if test.passed else '✗'} {test.name}: {test.found}" for test in self.tests]
        return unwrapped("\n".join([*lines, f"{self.host}: {verdict}"]))


def check_node(directory: str | Path = ".", *, gflops: float = 0.0, memory: float = 0.0) -> NodeReport:
    """Test this machine before it joins a run: exact matmuls on every device, memory, and the disk of a directory, best the one
    to train in. `gflops` is the least speed of each device, `memory` the least GB available.

    Takes a second or two. A launcher runs it before torchrun, so that a bad node never joins the others (docs/scale.md).
    """
    return NodeReport(socket.gethostname(), tuple(node_tests(Path(directory), gflops, memory)))
