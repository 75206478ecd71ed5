"""The self-test of a node: a good one passes, and each fault is found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dovetail as dt
from dovetail.api.check_node import NodeReport


def failed(report: NodeReport) -> list[str]:
    return [test.name for test in report.tests if not test.passed]


def test_a_good_node_passes_and_leaves_no_file(tmp_path: Path) -> None:
    report = dt.check_node(tmp_path)
    assert report.passed
    assert [test.name for test in report.tests][-2:] == ["memory", "disk"]
    assert list(tmp_path.iterdir()) == []
    assert "passed" in str(report)
    assert report.to_dict()["passed"] is True


def test_a_node_below_a_limit_fails(tmp_path: Path) -> None:
    report = dt.check_node(tmp_path, gflops=1e9, memory=1e9)
    assert failed(report)[:1] == ["matmul on cpu"]
    assert failed(report)[-1:] == ["memory"]
    assert "keep this node out of the job" in str(report)


def test_a_disk_that_cannot_be_written_fails(tmp_path: Path) -> None:
    report = dt.check_node(tmp_path / "missing")
    assert failed(report) == ["disk"]
    assert "No such file or directory" in str(report)


def test_one_wrong_element_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right, calls = torch.Tensor.__matmul__, list[int]()

    def wrong_once(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        product = right(a, b)
        calls.append(1)
        if len(calls) == 9:
            product[3, 5] += 1
        return product

    monkeypatch.setattr(torch.Tensor, "__matmul__", wrong_once)
    report = dt.check_node(tmp_path)
    assert failed(report) == ["matmul on cpu"]
    assert "1 wrong elements of" in str(report)


@pytest.mark.quick(1)
@pytest.mark.parametrize(("place", "code"), [(".", 0), ("missing", 1)])
def test_the_command_exits_with_1_for_a_bad_node(tmp_path: Path, place: str, code: int) -> None:
    command = [sys.executable, "-m", "dovetail", "doctor", "--node", place]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=200, check=False).returncode == code
