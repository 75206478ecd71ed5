"""Spoilt configs of every family are read or refused, by name; nothing is allocated by what they say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fuzz import cases
from hostile import grown

from dovetail.base.errors import DovetailError
from dovetail.disk.tensors import write_tensors
from dovetail.files.model_dir import WEIGHTS_FILE
from dovetail.hf.load import load
from dovetail.hf.origin import find_spec

QUICK, ALL = 60, 5_000
MOST = 50_000  # kB that one config may take


def try_all(count: int, place: Path) -> dict[str, int]:
    """How many were read and how many refused, and the most memory that one took in kB; any other error is raised."""
    import torch

    torch.set_num_threads(1)
    tensors = {"model.norm.weight": torch.zeros(3)}
    write_tensors(place / WEIGHTS_FILE, tensors, tensors.items())
    found = {"read": 0, "refused": 0, "memory": 0}

    def one() -> None:
        spec = None
        try:
            spec = find_spec(place)
            load(place)
            raise AssertionError("a model was loaded from three numbers")
        except DovetailError as error:
            said = str(error)
            assert str(place) in said, said
            assert len(said) < 3000, said
        found["refused" if spec is None else "read"] += 1

    for number, text in cases(count):
        (place / "config.json").write_text(text)
        try:
            taken = grown(one)
        except Exception as error:
            raise AssertionError(f"config {number}: {text[:2000]}") from error
        found["memory"] = max(found["memory"], taken)
    return found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("count", [QUICK, pytest.param(ALL, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_spoilt_configs_are_read_or_refused_by_name(count: int, tmp_path: Path) -> None:
    command = [sys.executable, __file__, str(count), str(tmp_path)]
    path = {"PYTHONPATH": ":".join([str(Path(__file__).parent), *sys.path])}
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **path}, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["read"] + found["refused"] == count
    assert found["refused"] > count // 4
    assert found["read"] > count // 20
    assert found["memory"] < MOST, found


if __name__ == "__main__":
    print(json.dumps(try_all(int(sys.argv[1]), Path(sys.argv[2]))))
