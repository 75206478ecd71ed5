"""A lab of drawn losses: what it trains, when it stops, and that a lab that is killed comes to the same verdicts."""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import fake_training
import pytest
from lab_designs import lab
from lab_kills import kill_repeatedly

from dovetail.base.errors import DovetailError, FileError
from dovetail.disk.yaml import dump_yaml
from dovetail.experiments.design import LabDesign, read_design
from dovetail.experiments.lab import LabState, run_lab
from dovetail.experiments.lab_runs import find_run
from dovetail.experiments.pool import WorkerEnded
from dovetail.experiments.results import TUNING_SEED, result_file
from dovetail.experiments.worker import train_one

HERE = Path(__file__).parent
ARMS = {"gqa": {"set": {"layers.*.mixer.kv_heads": 2}}}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), str(HERE.parents[1] / "src")]))
    (tmp_path / "plays.txt").write_text("words", encoding="utf-8")
    return tmp_path


def design(**keys: Any) -> LabDesign:
    return read_design(lab(**{"arms": ARMS, "seeds": {"at_least": 4, "at_most": 8}, **keys}))


def run(what: LabDesign, **keys: Any) -> LabState:
    return run_lab(what, Path("out"), fake_training.train, workers=2, **keys)


def starts() -> Counter[str]:
    return Counter(Path("out/starts.txt").read_text(encoding="utf-8").split())


def test_a_worse_arm_is_found_and_the_seeds_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_EFFECT", "0.1")
    events: list[str] = []
    state = run(design(), decided=lambda data, text: events.append(text))
    verdict = state.verdict("gqa")
    assert verdict is not None
    assert (verdict.kind, verdict.interval.n) == ("worse", 5)
    assert verdict.interval.mean == pytest.approx(0.2, abs=0.03)
    assert verdict.saved > 0.8
    assert len(state.results) <= 12  # ten, and what was trained ahead
    assert events == [f"gqa against base: {verdict}"]


def test_equal_arms_are_equal_or_unresolved(monkeypatch: pytest.MonkeyPatch) -> None:
    state = run(design(smallest=0.2))
    assert str(state.verdict("gqa")).startswith("equal within 0.2")
    fewer = run_lab(design(smallest=1e-6), Path("fewer"), fake_training.train, workers=2)
    verdict = fewer.verdict("gqa")
    assert verdict is not None
    assert (verdict.kind, verdict.interval.n) == ("unresolved", 8)


def test_runs_that_are_complete_are_not_trained_again(monkeypatch: pytest.MonkeyPatch) -> None:
    first = run(design(smallest=1e-6))
    before = starts()
    again = run(design(smallest=1e-6))
    assert starts() == before
    assert set(before.values()) == {1}
    assert again.verdict("gqa") == first.verdict("gqa")
    run(design(smallest=1e-6, seeds={"at_least": 4, "at_most": 9}))
    assert starts().total() == before.total() + 2
    assert set(starts().values()) == {1}


def test_a_run_whose_result_is_written_is_not_trained_by_the_process_that_replaces_a_lost_one(place: Path) -> None:
    (place / "a.json").write_text("{}", encoding="utf-8")
    train_one(lambda *_, **__: pytest.fail("it was trained again"), place / "a", {})
    assert (place / "a.json").read_text(encoding="utf-8") == "{}"


def test_what_determines_a_run_is_in_its_hash(place: Path) -> None:
    state = run(design(smallest=0.2))
    keys = {state.run(arm, seed).key for arm in ("base", "gqa") for seed in range(3)}
    assert len(keys) == 6
    for change in ({"budget": {"tokens": "3k"}}, {"train": {"length": 16}}, {"train": {"length": 32, "learning_rate": 0.01}}):
        assert LabState(design(**change), Path("out")).run("base", 0).key not in keys
    (place / "plays.txt").rename("moved.txt")
    assert LabState(design(data={"text": "moved.txt"}), Path("out")).run("base", 0).key in keys
    (place / "plays.txt").write_text("other words", encoding="utf-8")
    assert LabState(design(), Path("out")).run("base", 0).key not in keys


def test_arms_that_ask_for_one_run_share_it() -> None:
    state = run(design(arms={"same": {}}, smallest=0.01))
    assert str(state.verdict("same")).startswith("equal within 0.01 (+0.0000 to +0.0000) at 5 seeds")
    assert starts().total() <= 6


def test_staircases_are_compared_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_EFFECT", "0.1")
    arms = {"two": ARMS["gqa"], "one": {"on": "two", "set": {"layers.*.mixer.kv_heads": 1}}}
    state = run(design(arms=arms))
    verdict = state.verdict("one")
    assert verdict is not None
    assert verdict.interval.mean == pytest.approx(0.1, abs=0.03)
    assert state.arms["one"].changes == (("layers.*.mixer.kv_heads", "2", "1"),)


# -- tuning -----------------------------------------------------------------------------------------------------------

TUNE = {"learning_rate": [1e-3, 1e-1], "trials": 3, "seeds": 2}


def test_learning_rates_are_tuned_on_seeds_of_their_own() -> None:
    state = run(design(tune=TUNE, smallest=0.2))
    assert {state.rate("base"), state.rate("gqa")} == {fake_training.BEST_RATE}
    for name in state.arms:
        trials = list(state.trials(name))
        assert len(trials) == 6
        assert {len(values) for values in state.sweep(name).values()} == {2}
        seen = {trial.seed for trial in trials}
        judged = {state.run(name, seed).seed for seed in range(state.design.at_most)}
        assert not seen & judged, "seeds of the tuning are seeds of the verdict"
        assert not {trial.key for trial in trials} & {state.run(name, seed).key for seed in range(state.design.at_most)}


def test_verdicts_wait_for_every_trial() -> None:
    state = LabState(design(tune=TUNE), Path("out"))
    wanted = list(state.wanted())
    assert [run.tuning for run in wanted] == [True] * 12
    assert {run.seed for run in wanted} == {TUNING_SEED, TUNING_SEED + 1}


# -- what goes wrong --------------------------------------------------------------------------------------------------


def test_a_run_that_diverges_is_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_PROBLEM", "diverged")
    assert str(run(design()).verdict("gqa")) == "diverged at 1 of 2 seeds"
    assert set(starts().values()) == {1}


def test_the_error_of_a_run_ends_the_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_PROBLEM", "error")
    with pytest.raises(DovetailError, match=r"(base|gqa|alibi|\w+)-seed\d+-.*: plays.txt: is empty"):
        run(design())


@pytest.mark.slow
def test_a_process_that_is_killed_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_PROBLEM", "killed")
    state = run(design(smallest=0.2))
    assert str(state.verdict("gqa")).startswith("equal")
    assert starts().most_common(8)[-1][1] == 2  # of the eight runs that the verdict reads
    assert max(starts().values()) == 2
    monkeypatch.setenv("FAKE_PROBLEM", "always killed")
    with pytest.raises(WorkerEnded, match=r"its process ended 3 times, at last with -9"):
        run_lab(design(), Path("dead"), fake_training.train, workers=1)


def test_a_metric_that_is_not_measured_is_named() -> None:
    with pytest.raises(FileError, match="does not measure accuracy"):
        run(design(metric="accuracy"))


def test_one_lab_per_directory(place: Path) -> None:
    from dovetail.disk.atomic import try_locked

    Path("out").mkdir()
    (place / "out" / "lab.lock").touch()
    with try_locked(place / "out" / "lab.lock"), pytest.raises(FileError, match="another process runs a lab"):
        run(design())


def test_data_that_is_not_there_is_named() -> None:
    with pytest.raises(FileError, match=r"data\.text: there is no novels\.txt"):
        run(design(data={"text": "novels.txt"}))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_thirty_kills_of_a_lab_and_its_processes_change_no_verdict(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_SECONDS", "0.2")
    data = lab(arms=ARMS, seeds={"at_least": 22, "at_most": 22}, tune=TUNE, smallest=1e-6)
    (place / "lab.yaml").write_text(dump_yaml(data), encoding="utf-8")
    command = [sys.executable, str(HERE / "run_fake_lab.py"), "lab.yaml", "killed"]
    kills = kill_repeatedly(command, place / "killed" / "runs", ["lab", "worker"] * 15)
    assert kills == {"lab": 15, "worker": 15}
    monkeypatch.setenv("FAKE_SECONDS", "0")
    state, whole = LabState(read_design(data), Path("killed")), run(read_design(data))
    assert state.verdict("gqa") == whole.verdict("gqa")
    assert state.is_decided("gqa")
    assert state.metrics("base") == whole.metrics("base")
    started = Counter((place / "killed" / "starts.txt").read_text(encoding="utf-8").split())
    assert not any(name.endswith(fake_training.COMPLETE) for name in started), "a complete run was trained again"
    assert len(started) == 12 + 44
    assert sum(count - 1 for count in started.values()) <= 2 * kills["lab"] + kills["worker"]  # those in the middle


@pytest.mark.parametrize("name", ["older", "base-20k-1.5M"])
def test_a_run_is_found_by_its_hash_whatever_its_name(place: Path, name: str) -> None:
    state = LabState(design(), Path("out"))
    wanted = state.run("gqa", 0)
    assert find_run(state.runs, wanted) == state.runs / wanted.name
    other = state.runs / f"{name}-seed0-{wanted.key}"
    other.mkdir()
    assert find_run(state.runs, wanted) == other
    result_file(other).write_text("{}", encoding="utf-8")
    (state.runs / f".x-{wanted.key}").mkdir()
    assert find_run(state.runs, wanted) == other
    assert result_file(other).is_file()
