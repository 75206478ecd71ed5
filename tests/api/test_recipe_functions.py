"""dt.list_recipes and dt.copy_recipe, and their verbs."""

from __future__ import annotations

import ast
import json
import os
from pathlib import Path

import pytest

import dovetail as dt
from dovetail.cli import main

ROOT = Path(__file__).parents[2]


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main([*args])
    return int(ended.value.code or 0)


def test_every_recipe_is_listed_with_its_first_line() -> None:
    listed = {one.name: one.summary for one in dt.list_recipes()}
    assert set(listed) == {path.stem for path in (ROOT / "recipes").glob("*.py")} - {"run"}
    for name, summary in listed.items():
        text = (ROOT / f"recipes/{name}.py").read_text(encoding="utf-8")
        assert (ast.get_docstring(ast.parse(text)) or "").startswith(f"{summary}\n")
        assert summary.endswith(".")


def test_a_recipe_is_copied_and_nothing_is_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert dt.copy_recipe("induction").out == Path("induction.py")
    assert Path("induction.py").read_bytes() == (ROOT / "recipes/induction.py").read_bytes()
    Path("induction.py").write_text("mine")
    with pytest.raises(dt.DovetailError, match=r"induction.py: exists already; .* force=True"):
        dt.copy_recipe("induction")
    assert Path("induction.py").read_text() == "mine"
    dt.copy_recipe("induction", force=True)
    assert Path("induction.py").read_text() != "mine"
    with pytest.raises(dt.DovetailError, match=r"no recipe is called '../x'"):
        dt.copy_recipe("../x")
    assert os.listdir() == ["induction.py"]


def test_the_verbs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("recipes", "--json") == 0
    assert {"name", "summary"} == set(json.loads(capsys.readouterr().out)[0])
    assert run("recipes", "copy", "features") == 0
    assert "features.py" in capsys.readouterr().out
    assert run("recipes", "copy") == 2
    assert run("recipes", "cpoy") == 2
    assert run("recipes", "copy", "nothing") == 4


def test_commands_in_the_help_keep_their_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("recipes", "--help") == 0
    assert "\n    dovetail recipes\n    dovetail recipes copy induction\n" in capsys.readouterr().out
