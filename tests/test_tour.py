"""The tour of CONTRIBUTING.md: each command is run in a copy, and each change fails the check that the text names."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from test_snippets import Snippet, snippets

ROOT = Path(__file__).parent.parent
GUIDE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PART = "src/dovetail/parts/position/bias.py"


def tour() -> str:
    """The chapter of the tour."""
    return GUIDE.partition("## One hour with one part")[2].partition("\n## ")[0]


def blocks(language: str) -> list[Snippet]:
    return [snippet for snippet in snippets(tour()) if snippet.language == language]


def changed(text: str, diff: str) -> str:
    """A file after a diff of one line, which must be there once."""
    old, new = (line[1:] for line in diff.splitlines())
    assert diff.startswith("-")
    assert text.count(old + "\n") == 1, old
    return text.replace(old, new)


def test_the_tour_names_what_is_there() -> None:
    text = (ROOT / PART).read_text(encoding="utf-8")
    assert f"`{PART}`, {len(text.splitlines())} lines" in tour()
    for diff in blocks("diff"):
        assert changed(text, diff.text) != text
    assert '@oracle("alibi")' in (ROOT / "checks/oracles/position.py").read_text(encoding="utf-8")
    (bug,) = re.findall(r'has "(.*?)"', tour(), re.DOTALL)
    seeded = (ROOT / "checks/mutants/seeded/position.py").read_text(encoding="utf-8")
    assert f'"{" ".join(bug.split())}",\n            "chunked"' in seeded


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of what the commands read."""
    for name in ("src", "tests", "checks", "pyproject.toml"):
        source = ROOT / name
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source, tmp_path / name, ignore=ignore) if source.is_dir() else shutil.copy(source, tmp_path / name)
    return tmp_path


def run(command: str, home: Path) -> subprocess.CompletedProcess[str]:
    program, *args = shlex.split(command)
    module = {"dovetail": "dovetail", "pytest": "pytest"}[program]
    env = os.environ | {"PYTHONPATH": str(home / "src"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, "-P", "-m", module, *args], cwd=home, env=env, capture_output=True, text=True, timeout=900, check=False
    )


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_step_of_the_tour(copy: Path) -> None:
    (show,), (oracle, law) = ([line for line in block.text.splitlines() if line] for block in blocks("bash"))
    decode, slopes = (block.text for block in blocks("diff"))
    original = (copy / PART).read_text(encoding="utf-8")

    def code(command: str) -> int:
        done = run(command, copy)
        assert "Traceback" not in done.stderr, done.stderr
        print(command, done.returncode, done.stdout[-2000:], done.stderr[-1000:])
        return done.returncode

    assert [code(command) for command in (show, oracle, law)] == [0, 0, 0]
    (copy / PART).write_text(changed(original, decode), encoding="utf-8")
    seen = run(law, copy)
    assert seen.returncode == 1
    assert re.search(r"chunked.*row \d+ .*differ by", seen.stdout, re.DOTALL), seen.stdout
    (copy / PART).write_text(changed(original, slopes), encoding="utf-8")
    assert code(law) == 0
    failed = run(oracle, copy)
    assert failed.returncode == 1
    assert "alibi, slopes of 8 heads" in failed.stdout
