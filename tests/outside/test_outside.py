"""A part from another package: found by its entry point, listed, shown, drawn into wirings, and held to every law.

The package in `offset_position/` is made to count as installed by what an installer would write, a `.dist-info` on the path.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
PACKAGE = HERE / "offset_position"
LONGEST = 60  # lines of the part, imports and all


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """An environment in which the package is installed."""
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    info = tmp_path / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    offered = "".join(f"{name} = {module}\n" for name, module in project["entry-points"]["dovetail.parts"].items())
    (info / "entry_points.txt").write_text(f"[dovetail.parts]\n{offered}")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(PACKAGE / "src")]), "OMP_NUM_THREADS": "1"}


def run(env: dict[str, str], *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *args], env=env, capture_output=True, text=True, timeout=280, check=False)


def cli(env: dict[str, str], *args: str) -> Any:
    done = run(env, "-m", "dovetail.cli", *args, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_part_is_short() -> None:
    lines = (PACKAGE / "src/offset_position/__init__.py").read_text().splitlines()
    assert len(lines) <= LONGEST


def test_the_part_is_listed_where_it_is_installed_and_only_there(installed: dict[str, str]) -> None:
    listed = {part["kind"]: part for part in cli(installed, "parts", "--group", "position")}
    assert listed["offset"]["fields"] == [{"name": "start", "type": "float", "default": 0.1}]
    bare = {name: value for name, value in installed.items() if name != "PYTHONPATH"}
    assert {part["kind"] for part in cli(bare, "parts", "--group", "position")} == set(listed) - {"offset"}


def test_the_command_line_takes_it_like_any_other(installed: dict[str, str]) -> None:
    plain = cli(installed, "show", "llama-tiny")
    swapped = cli(installed, "show", "llama-tiny", "--swap", "position={kind: offset, start: 0.2}")
    assert swapped["parameters"] == plain["parameters"] + 6 * 8  # a slope for each of 8 heads, in 6 layers
    refused = run(installed, "-m", "dovetail.cli", "show", "llama-tiny", "--swap", "position={kind: offset, start: -1}")
    assert refused.returncode == 3
    assert "layers.0.mixer.position.start: -1.0 is below 0" in refused.stderr


@pytest.mark.slow
def test_every_law_holds_in_every_wiring_drawn_for_it(installed: dict[str, str]) -> None:
    done = run(installed, str(HERE / "hold_offset.py"))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["oracles"] == []
    assert len(found["rows"]) >= 6
    states: dict[str, set[str]] = {}
    for row in found["rows"]:
        assert row["holds"] > 0
        for law in row["laws"]:
            assert law["state"] in ("held", "not applicable"), f"{law['law']}: {law['detail']}\n{row['spec']}"
            states.setdefault(law["law"], set()).add(law["state"])
    never = {law for law, seen in states.items() if "held" not in seen}
    assert never == {"ported"}, "the reference library has no such position; every other law must have compared something"


@pytest.mark.slow
def test_a_bug_in_it_is_seen(installed: dict[str, str]) -> None:
    done = run(installed, str(HERE / "hold_offset.py"), "--plant")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert {law["law"]: law["state"] for law in row["laws"]} == {"chunked": "failed", "causal": "held"}
