"""check_node: test this machine before it joins a training run."""

from __future__ import annotations

import dataclasses as dc
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from dovetail.api.result import Result
from dovetail.views.blocks import View

if TYPE_CHECKING:
    from dovetail.parallel.node import NodeTest
from dovetail.base.option import Option


@dc.dataclass(frozen=True, repr=False)
class NodeReport(Result):
    """The tests of a node."""

    host: str
    tests: tuple[NodeTest, ...]

    @property
    def passed(self) -> bool:
        """Whether the node passed every test."""
        return all(test.passed for test in self.tests)

    @property
    def failed(self) -> bool:
        return not self.passed

    def to_dict(self) -> dict[str, Any]:
        return {"host": self.host, "passed": self.passed, "tests": [test._asdict() for test in self.tests]}

    def view(self, width: int) -> View:
        verdict = "passed" if self.passed else "failed: keep this node out of the job"
        lines = [f"{'✓' if test.passed else '✗'} {test.name}: {test.found}" for test in self.tests]
        return "\n".join([*lines, f"{self.host}: {verdict}"])


def check_node(
    directory: str | Path = ".",
    *,
    gflops: Annotated[float, Option("With --node: the minimum GFLOP/s of a float32 matmul, per device.")] = 0.0,
    memory: Annotated[float, Option("With --node: the minimum GB of available memory.")] = 0.0,
) -> NodeReport:
    """Test this machine before it joins a run: exact matmuls on every device, memory, and the disk of a directory, best the one
    to train in. `gflops` is the least speed of each device, `memory` the least GB available.

    Takes a second or two. A launcher runs it before torchrun, so that a bad node never joins the others (docs/scale.md).
    """
    from dovetail.parallel.node import node_tests

    return NodeReport(socket.gethostname(), tuple(node_tests(Path(directory), gflops, memory)))
