"""A part from another package: found by its entry point, listed, shown, used in sampled specs, and tested by every law.

The package in `offset_position/` counts as installed by the metadata that an installer writes, a `.dist-info` on the path.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from dovetail import parts as _registered  # noqa: F401  every kind must be known here to see what is new there
from dovetail.spec.part import KINDS

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
    return subprocess.run([sys.executable, *args], env=env, capture_output=True, text=True, timeout=580, check=False)


ASKED = """
import contextlib, io, json, sys
from dovetail.cli import main

answers = []
for line in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(line)
        except SystemExit as ended:
            answers.append([ended.code, out.getvalue(), err.getvalue()])
print(json.dumps(answers))
"""


def ask(scope: dict[str, str], *lines: list[str]) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of each command line, all in one process."""
    done = run(scope, "-c", ASKED, json.dumps(lines))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_part_is_short() -> None:
    lines = (PACKAGE / "src/offset_position/__init__.py").read_text().splitlines()
    assert len(lines) <= LONGEST


@pytest.mark.slow
def test_where_it_is_installed_the_command_line_takes_it_like_any_other(installed: dict[str, str]) -> None:
    listed, plain, swapped, refused = ask(
        installed,
        ["parts", "--group", "position", "--json"],
        ["show", "llama-tiny", "--json"],
        ["show", "llama-tiny", "--swap", "position={kind: offset, start: 0.2}", "--json"],
        ["show", "llama-tiny", "--swap", "position={kind: offset, start: -1}"],
    )
    assert (listed[0], plain[0], swapped[0], refused[0]) == (0, 0, 0, 3)
    parts = {part["kind"]: part for part in json.loads(listed[1])}
    assert parts["offset"]["fields"] == [{"name": "start", "type": "float", "default": 0.1}]
    assert parts.keys() - {kind for kind, cls in KINDS.items() if cls.group == "position"} == {"offset"}  # not here, but there
    gained = json.loads(swapped[1])["parameters"] - json.loads(plain[1])["parameters"]
    assert gained == 6 * 8  # a slope for each of 8 heads, in 6 layers
    assert "layers.0.mixer.position.start: -1.0 is below 0" in refused[2]


@pytest.mark.slow
def test_every_law_holds_on_every_spec_sampled_for_it(installed: dict[str, str]) -> None:
    done = run(installed, str(HERE / "hold_offset.py"))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["oracles"] == []
    assert len(found["rows"]) >= 6
    states: dict[str, set[str]] = {}
    for row in found["rows"]:
        assert row["holds"] > 0
        for law in row["laws"]:
            assert law["state"] in ("passed", "not applicable"), f"{law['law']}: {law['detail']}\n{row['spec']}"
            states.setdefault(law["law"], set()).add(law["state"])
    never = {law for law, seen in states.items() if "passed" not in seen}
    assert never == {"ported"}, "the reference library has no such position; every other law must have compared something"


@pytest.mark.slow
def test_a_seeded_bug_in_it_is_caught(installed: dict[str, str]) -> None:
    done = run(installed, str(HERE / "hold_offset.py"), "--plant")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert {law["law"]: law["state"] for law in row["laws"]} == {"chunked": "failed", "causal": "passed"}
