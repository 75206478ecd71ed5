"""The public surface is typed: pyright, strict, accepts every line of tests/typed/front_door.py; no function returns Any."""

from __future__ import annotations

import inspect
import json
import shutil
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import dovetail
from dovetail.base.value import TypeNames

HERE = Path(__file__).parent


@pytest.mark.slow
def test_pyright_knows_the_types_of_the_front_door(tmp_path: Path) -> None:
    shutil.copy(HERE / "typed" / "front_door.py", tmp_path)
    config = {
        "typeCheckingMode": "strict",
        "reportUnnecessaryTypeIgnoreComment": "error",
        "extraPaths": [str(HERE.parent / "src")],
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "pyright", "--outputjson", "-p", str(tmp_path), "--pythonpath", sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    report = json.loads(done.stdout)
    found = [f"{one['range']['start']['line'] + 1}: {one['message']}" for one in report["generalDiagnostics"]]
    assert report["summary"]["filesAnalyzed"] == 1
    assert found == []


def test_no_public_function_returns_any() -> None:
    for name in dir(dovetail):
        value = getattr(dovetail, name)
        if inspect.isfunction(value):
            hints = typing.get_type_hints(value, localns=TypeNames(value))
            assert hints.get("return") not in (None, typing.Any), f"dovetail.{name} does not say what it returns"
