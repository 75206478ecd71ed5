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


@pytest.fixture
def project(tmp_path: Path, figures: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "docs/figures").mkdir(parents=True)
    (tmp_path / "src/room").mkdir(parents=True)
    (tmp_path / "src/room/part.py").write_text("x = 1\n")
    (tmp_path / "src/other.py").write_text("y = 1\n")
    command = 'python -c \'print({}) if False else print("{\\"rows\\": []}")\''
    monkeypatch.setattr(
        figures, "TABLE", {"room": figures.Figure(command, ("src/room",)), "never": figures.Figure("false", ())}
    )
    return tmp_path


def test_a_figure_is_fresh_until_what_it_measured_changes(figures: Any, project: Path) -> None:
    taken = figures.take("room", project)
    assert taken["result"] == {"rows": []}
    states = {one.name: one.state for one in figures.standings(project)}
    assert states == {"room": "fresh", "never": "not taken"}
    (project / "src/other.py").write_text("y = 2\n")
    assert figures.standings(project)[0].state == "fresh"
    (project / "src/room/part.py").write_text("x = 2\n")
    assert figures.standings(project)[0].state == "stale"


def test_a_result_without_a_hash_is_stale(figures: Any, project: Path) -> None:
    (project / "docs/figures/room.json").write_text(json.dumps({"rows": []}))
    assert figures.standings(project)[0].state == "stale"


def test_a_command_that_prints_no_json_writes_nothing(figures: Any, project: Path) -> None:
    with pytest.raises(SystemExit, match="printed no JSON"):
        figures.take("never", project)
    assert not (project / "docs/figures/never.json").exists()


def test_sources_that_change_meanwhile_write_nothing(figures: Any, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touching = 'python -c \'open("src/room/part.py", "a").write("# more"); print("{}")\''
    monkeypatch.setattr(figures, "TABLE", {"room": figures.Figure(touching, ("src/room",))})
    with pytest.raises(SystemExit, match="changed while"):
        figures.take("room", project)


def test_every_figure_measures_files_that_exist(figures: Any) -> None:
    planned = {"benchmarks/hostile.py", "benchmarks/startup.py", "benchmarks/tiny.py"}
    for name, figure in figures.TABLE.items():
        for path in figure.measures:
            assert (figures.ROOT / path).exists() or path in planned, f"{name} measures {path}"
