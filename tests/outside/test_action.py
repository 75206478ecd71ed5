"""The GitHub Action: its description is consistent, and its script runs as GitHub would run it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
ACTION: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
SCRIPT = (ROOT / "action/run").read_text(encoding="utf-8")
(STEP,) = [step for step in ACTION["runs"]["steps"] if "run" in step]


def test_the_action_is_composite_and_describes_its_inputs() -> None:
    assert set(ACTION) == {"name", "description", "inputs", "outputs", "runs"}
    assert ACTION["runs"]["using"] == "composite"
    assert all(step.keys() >= {"shell"} for step in ACTION["runs"]["steps"] if "run" in step)
    for name, fields in ACTION["inputs"].items():
        assert set(fields) <= {"description", "required", "default"}, name
        assert fields["description"]
        assert fields.get("required") is True or isinstance(fields["default"], str), name


def test_every_input_is_used_and_reaches_the_script_as_a_variable_only() -> None:
    used = set(re.findall(r"\$\{\{ inputs\.([\w-]+)", (ROOT / "action.yml").read_text(encoding="utf-8")))
    assert used == set(ACTION["inputs"])
    assert "${{" not in STEP["run"]  # text of a user in a command would be run as one
    assert set(re.findall(r"DOVETAIL_\w+", SCRIPT)) == set(STEP["env"])


def test_no_host_is_named() -> None:
    for file in (ROOT / "action.yml", ROOT / "action/run", ROOT / "action/summary.py"):
        assert "://" not in file.read_text(encoding="utf-8"), file


def run(where: Path, **settings: str) -> tuple[int, str, str, str]:
    """The script as a step of a job: exit code, log, summary, outputs."""
    summary, output = where / "summary.md", where / "output.txt"
    github = {
        "GITHUB_ACTIONS": "true",
        "GITHUB_ACTION_PATH": str(ROOT),
        "GITHUB_WORKSPACE": str(where),
        "GITHUB_STEP_SUMMARY": str(summary),
        "GITHUB_OUTPUT": str(output),
    }
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, **github, "PATH": path, "DOVETAIL_INSTALL": "false", **settings}
    done = subprocess.run(["bash", "-c", STEP["run"]], cwd=where, env=env, capture_output=True, text=True, timeout=240)
    texts = (file.read_text(encoding="utf-8") if file.exists() else "" for file in (summary, output))
    return done.returncode, done.stdout + done.stderr, *texts


def test_without_a_side_it_says_what_to_do(tmp_path: Path) -> None:
    code, log, _, _ = run(tmp_path, DOVETAIL_SIDES=" \n")
    assert code == 2
    assert "no side is given; write one per line" in log


@pytest.mark.slow
def test_the_script_tests_each_side_and_fails_where_a_law_does(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    shutil.copy(ROOT / "tests/proof/foreign_model.py", tmp_path / "package" / "models.py")
    sides = "py:package.models:Tiny\n  py:package.models:leak  \n"
    code, log, summary, output = run(tmp_path, DOVETAIL_SIDES=sides, DOVETAIL_LAWS="causal")
    assert code == 1, log
    assert output == "failed=1\n"
    assert "py:package.models:Tiny: causal: passed" in log
    assert "py:package.models:leak: causal: failed: outputs before token 1" in log
    clean, broken = summary.split("### ")[1:]
    assert clean.startswith("py:package.models:Tiny\n")
    assert "| ✅ | causal |" in clean
    assert "❌" not in clean
    assert "| ❌ | causal |" in broken


@pytest.mark.slow
def test_a_side_that_cannot_be_opened_is_no_law_that_fails(tmp_path: Path) -> None:
    code, log, summary, output = run(tmp_path, DOVETAIL_SIDES="py:nowhere.py:make; touch injected")
    assert code > 1, log
    assert not (tmp_path / "injected").exists()
    assert output == "failed=0\n"
    assert "Could not be tested" in summary


def test_text_of_a_model_is_no_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "action"))
    import summary

    assert summary.cell("a | b\n<img> `x`") == "a \\| b &lt;img> \\`x\\`"


@pytest.mark.parametrize(
    ("text", "failed"),
    [
        ('{\n "laws": [{"law": "causal", "state": "failed", "detail": ""}]\n}', 1),
        ('loading\n{\n "laws": [{"law": "causal", "state": "passed", "detail": ""}]\n}', 0),
        ("", None),
        ("printed by the model, which then ended the process", None),
    ],
)
def test_a_result_that_is_not_there_is_no_pass(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, failed: int | None
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "action"))
    import summary

    (tmp_path / "result").write_text(text)
    assert summary.main("py:a.py:b", "0", str(tmp_path / "result"), str(tmp_path / "summary.md")) == failed
