"""Figures carry a hash of what they measured: a change of these files makes them stale, and nothing else does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import figures

    return figures


SCRIPT = """
import sys
from room.part import x
if sys.argv[1:] == ["--touch"]:
    open("src/room/part.py", "a").write("# more")
print('{"rows": []}')
"""


@pytest.fixture
def project(tmp_path: Path, figures: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    for folder in ("docs/figures", "src/room", "benchmarks"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "src/room/__init__.py").write_text("")
    (tmp_path / "src/room/part.py").write_text("x = 1\n")
    (tmp_path / "src/room/other.py").write_text("y = 1\n")
    (tmp_path / "benchmarks/script.py").write_text(SCRIPT)
    (tmp_path / "benchmarks/silent.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "src"))
    table = {"room": figures.Figure("python benchmarks/script.py"), "never": figures.Figure("python benchmarks/silent.py")}
    monkeypatch.setattr(figures, "TABLE", table)
    return tmp_path


def test_a_figure_is_fresh_until_what_it_measured_changes(figures: Any, project: Path) -> None:
    taken = figures.take("room", project)
    assert taken["result"] == {"rows": []}
    states = {one.name: one.state for one in figures.standings(project)}
    assert states == {"room": "fresh", "never": "not taken"}
    (project / "src/room/other.py").write_text("y = 2\n")
    assert figures.standings(project)[0].state == "fresh"
    (project / "src/room/part.py").write_text("x = 2\n")
    assert figures.standings(project)[0].state == "stale"


def test_a_result_without_a_hash_is_stale(figures: Any, project: Path) -> None:
    (project / "docs/figures/room.json").write_text(json.dumps({"rows": []}))
    assert figures.standings(project)[0].state == "stale"


GOALS = """
import json, sys
print(json.dumps({"rows": [{"name": "a", "value": 1, "goal": "≥ 1", "holds": HOLDS, "spread": 0.1}]}))
"""


@pytest.mark.parametrize(("holds", "code"), [("True", 0), ("None", 3), ("False", 1)])
def test_the_exit_code_tells_what_holds_fails_and_is_undecided(
    figures: Any, project: Path, monkeypatch: pytest.MonkeyPatch, holds: str, code: int
) -> None:
    (project / "benchmarks/script.py").write_text(GOALS.replace("HOLDS", holds))
    monkeypatch.setattr(figures, "ROOT", project)
    monkeypatch.setattr(figures.take, "__defaults__", (project,))
    monkeypatch.setattr("sys.argv", ["figures.py", "room"])
    assert figures.main() == code


def test_stale_figures_are_measured_until_the_time_is_up(
    figures: Any, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(figures, "ROOT", project)
    for function in (figures.take, figures.left, figures.standings):
        monkeypatch.setattr(function, "__defaults__", (project,))
    monkeypatch.setattr("sys.argv", ["figures.py", "--stale", "--minutes", "2"])
    figures.TABLE.pop("never")
    assert figures.main() == 0
    assert [one.state for one in figures.standings()] == ["fresh"]
    assert figures.main() == 0  # nothing is left
    file = project / "docs/figures/room.json"
    data = json.loads(file.read_text())
    data["taken"] |= {"sources": "other", "seconds": 1000}
    file.write_text(json.dumps(data))
    assert figures.main() == 75
    assert "room: left; it took 1000 s" in capsys.readouterr().err


def test_a_command_that_prints_no_json_writes_nothing(figures: Any, project: Path) -> None:
    with pytest.raises(SystemExit, match="printed no JSON"):
        figures.take("never", project)
    assert not (project / "docs/figures/never.json").exists()


def test_sources_that_change_meanwhile_write_nothing(figures: Any, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "TABLE", {"room": figures.Figure("python benchmarks/script.py --touch")})
    with pytest.raises(SystemExit, match="changed while"):
        figures.take("room", project)


def test_a_command_without_a_script_is_refused(figures: Any) -> None:
    with pytest.raises(SystemExit, match="neither a script nor a program"):
        figures.sources("python benchmarks/no_such_script.py")
