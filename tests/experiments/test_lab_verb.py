"""`dovetail lab` with runs that train: the pairs, the report as data, text and page, and a second call that trains nothing."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
from lab_designs import BASE
from lab_kills import kill_repeatedly

import dovetail as dt
from dovetail.api.lab import LabResult
from dovetail.disk.yaml import dump_yaml

pytestmark = pytest.mark.slow
DESIGN = {
    "base": BASE.replace("vocab: 64", "vocab: 270"),
    "arms": {"gqa": {"set": {"layers.*.mixer.kv_heads": 2}}, "alibi": {"on": "gqa", "swap": {"position": "alibi"}}},
    "match": "params",
    "data": {"text": "notes.txt"},
    "train": {"batch": 2, "length": 16, "evals": 2},
    "budget": {"steps": 4},
    "tune": {"learning_rate": [1e-3, 1e-2], "trials": 2},
    "seeds": {"at_least": 2, "at_most": 2},
    "smallest": 0.01,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("lab")
    (place / "notes.txt").write_text("It was the best of times, it was the worst of times.\n" * 60, encoding="utf-8")
    return place


@pytest.fixture(scope="module")
def result(place: Path) -> LabResult:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        return dt.lab(DESIGN, out="out", workers=2)


def test_runs_are_pairs_of_ordinary_runs(result: LabResult, place: Path) -> None:
    report = result.report
    assert {(row.arm, row.seed) for row in report.runs if not row.tuning} == {(a, s) for a in report.arms for s in (0, 1)}
    assert len([row for row in report.runs if row.tuning]) == 6
    assert report.equal_weights["alibi"] == 1.0
    assert 0.3 < report.equal_weights["gqa"] < 1.0
    runs = {record.place.name: record for record in dt.runs(place / "out").records}
    assert {row.run.name for row in report.runs} == set(runs)
    assert not list((place / "out").rglob("checkpoints"))
    for row in report.runs:
        assert runs[row.run.name].held_out_loss == pytest.approx(row.value)
    both = [next(r for r in report.runs if (r.arm, r.seed) == (arm, 0)) for arm in ("gqa", "alibi")]
    compared = dt.runs(*(place / "out" / "runs" / row.run.name for row in both)).comparisons[0]
    assert compared.order_differs == ()
    assert compared.different_weights == ()


def test_the_report_is_data_text_and_a_page(result: LabResult, place: Path) -> None:
    data = json.loads((place / "out" / "lab.json").read_text(encoding="utf-8"))
    assert data["verdicts"]["alibi"]["on"] == "gqa"
    assert data["verdicts"]["gqa"]["text"] == str(result.verdicts["gqa"])
    assert data["design"] == DESIGN
    frame = result.frame()
    assert set(frame) == {"arm", "seed", "learning_rate", "tuning", "value", "seconds", "run"}
    assert {len(column) for column in frame.values()} == {12}
    page = (place / "out" / "lab.html").read_text(encoding="utf-8")
    for word in (
        "forest",
        "Held-out loss by FLOPs",
        "Tuning of the learning rate",
        "SHA-256",
        "kv_heads 4 → 2",
        "solved for equal params",
    ):
        assert word in page
    assert str(result.verdicts["gqa"]) in str(result)


def test_the_same_call_trains_nothing(result: LabResult, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    begin = time.time()
    again = dt.lab(DESIGN, out="out", workers=2)
    assert again.to_dict() == result.to_dict()
    assert max(path.stat().st_mtime for path in (place / "out" / "runs").rglob("*")) < begin


@pytest.mark.timeout(1800)
def test_kills_in_the_middle_of_real_runs_change_no_number(
    result: LabResult, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    (place / "lab.yaml").write_text(dump_yaml(DESIGN), encoding="utf-8")
    command = [sys.executable, "-m", "dovetail", "lab", "lab.yaml", "-o", "killed", "--workers", "2"]
    kills = kill_repeatedly(command, place / "killed" / "runs", ["worker", "lab", "worker", "lab"])
    assert sum(kills.values()) == 4
    data = json.loads((place / "killed" / "lab.json").read_text(encoding="utf-8"))
    assert data["verdicts"] == json.loads(json.dumps(result.to_dict()["verdicts"]))
    values = {(row["run"], row["value"]) for row in data["runs"]}
    assert values == {(row["run"], row["value"]) for row in result.to_dict()["runs"]}
