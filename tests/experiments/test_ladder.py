"""A lab with sizes: the rungs, what each is trained on, whose learning rate it has, and the law that its report fits."""

from __future__ import annotations

import dataclasses as dc
import re
from pathlib import Path
from typing import Any

import pytest
from lab_designs import lab

from dovetail.base.errors import FileError, SpecError
from dovetail.disk.atomic import write_atomically
from dovetail.experiments.arms import build_arms
from dovetail.experiments.design import read_design
from dovetail.experiments.lab import LabState
from dovetail.experiments.lab_runs import find_run
from dovetail.experiments.report import LabReport, lab_report
from dovetail.experiments.results import result_file, result_text
from dovetail.experiments.scaling import ScalingLaw
from dovetail.spec.fold import parameters
from dovetail.views.blocks import result_text as text_of
from dovetail.views.lab import lab_page, lab_view

SIZES = ["20k", "40k", "80k"]
LAW = ScalingLaw(1.5, 60.0, 300.0, 0.4, 0.45)


def ladder(**keys: Any) -> dict[str, Any]:
    basic = {
        "arms": {},
        "sizes": SIZES,
        "budget": {"tokens_per_parameter": [5, 20, 80]},
        "seeds": {"at_least": 2, "at_most": 2},
    }
    return lab(**{**basic, **keys})


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plays.txt").write_text("words", encoding="utf-8")
    return tmp_path


def trained(data: dict[str, Any], law: ScalingLaw = LAW) -> LabState:
    """A lab whose runs have the losses of a law, which is 0.1 above it for all arms but the base."""
    state = LabState(read_design(data), Path("out"))
    while wanted := list(state.wanted()):
        for run in wanted:
            arm, tokens = state.arms[run.arm], run.arguments["tokens"]
            loss = law.loss(arm.costs.parameters, tokens) * (1 + 0.0005 * run.seed) + 0.1 * (arm.group != "base")
            loss += 0.01 * (run.rate is not None and run.rate > 2e-3)
            report = {"held_out_loss": loss, "tokens": tokens, "seconds": 2.0, "step_seconds": 0.25}
            write_atomically(result_file(find_run(state.runs, run)), result_text(report, [[10, 1, loss + 1], [20, 2, loss]]))
            state.complete(run)
    return state


def test_every_arm_is_built_at_every_size_and_budget() -> None:
    arms = build_arms(read_design(ladder(arms={"alibi": {"swap": {"position": "alibi"}}}, match="params")))
    assert len(arms) == 2 * 3 * 3
    for arm in arms.values():
        assert arm.on == (None if arm.group == "base" else arm.name.replace("alibi", "base"))
        assert arm.budget["tokens"] in {round(arms[arm.on or arm.name].costs.parameters * k) for k in (5, 20, 80)}
    counts = {name: arm.costs.parameters for name, arm in arms.items() if arm.group == "base"}
    assert all(abs(count / float(name.split("-")[1][:-1]) - 1000) < 100 for name, count in counts.items())
    heads = {arm.spec.layers[0].mixer.head for arm in arms.values()}
    assert heads == {4}, "heads keep their size"


def test_isoflops_are_runs_of_equal_compute() -> None:
    arms = build_arms(read_design(ladder(budget={"flops": 1e11})))
    computes = [6 * parameters(arm.spec) * arm.budget["tokens"] for arm in arms.values()]
    assert computes == [pytest.approx(1e11, rel=1e-3)] * 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sizes": ["20k", "20k"]}, "lab: sizes: is empty, or has a number twice"),
        ({"held_out": ["20k"]}, "lab: held_out: 20000 is among sizes, too"),
        ({"budget": {"steps": 4}}, "lab: budget.steps: is not a key"),
        ({"metric": "accuracy"}, "lab: metric: a scaling law is fitted to a loss"),
    ],
)
def test_what_a_ladder_cannot_be(change: dict[str, Any], message: str) -> None:
    with pytest.raises(FileError, match=message):
        read_design(ladder(**change))


def test_what_only_a_ladder_has_is_refused_without_sizes() -> None:
    with pytest.raises(FileError, match=r"budget\.flops: is not a key"):
        read_design(lab(budget={"flops": 1e9}))
    with pytest.raises(FileError, match="held_out: is of sizes that no fit reads"):
        read_design(lab(held_out=["1M"]))


def test_a_size_that_no_width_has_is_refused() -> None:
    with pytest.raises(SpecError, match=r"sizes: no width brings the base to 200 parameters; the nearest has"):
        build_arms(read_design(ladder(sizes=[200])))


@pytest.mark.parametrize("init", ["normal", "mup"])
def test_mup_keeps_the_learning_rate_of_the_smallest_size(init: str) -> None:
    base = lab()["base"] + f"init: {init}\n"
    state = trained(ladder(base=base, tune={"learning_rate": [1e-3, 1e-2], "trials": 2}, budget={"tokens_per_parameter": 20}))
    smallest = next(iter(state.arms))
    assert state.tuned == ([smallest] if init == "mup" else list(state.arms))
    assert {state.rate(name) for name in state.arms} == {1e-3}
    assert sum(row.tuning for row in lab_report(state).runs) == 2 * len(state.tuned)


@pytest.fixture
def report() -> LabReport:
    return lab_report(trained(ladder(held_out=["160k"])))


def test_the_law_of_the_runs_is_fitted_and_predicts_the_size_that_was_held_out(report: LabReport) -> None:
    base = report.scaling["base"]
    assert base.fit is not None
    assert len(base.fit.runs) == 2 * 9
    assert base.fit.law.alpha == pytest.approx(LAW.alpha, abs=0.05)
    assert len(base.predictions) == 3
    assert all(at.holds for at in base.predictions)
    assert all(at.arm.startswith("base-160k-") for at in base.predictions)
    assert report.notes == ["no learning rate was tuned: the verdicts hold at this one"]
    data = report.to_dict()["scaling"]["base"]
    assert data["held_out"][0]["holds"]
    assert len(data["fit"]["frontier"]) == 9


def test_a_size_that_the_law_misses_is_a_note(report: LabReport) -> None:
    base = report.scaling["base"]
    missed = dc.replace(base, predictions=tuple(dc.replace(at, measured=at.measured + 1) for at in base.predictions))
    notes = dc.replace(report, scaling={"base": missed}).notes
    assert sum("outside the interval that the law of base predicts" in note for note in notes) == 3


def test_text_and_page_have_the_law_the_curves_and_the_frontier(report: LabReport) -> None:
    text, page = text_of(lambda width: lab_view(report)), lab_page(report)
    for word in ("base: L(N, D) = E + A/N^alpha + B/D^beta, fitted to 18 runs", "held out", "best at"):
        assert word in text
    for word in ("Scaling law of base", "IsoFLOP curves of base, of the law", "Compute-optimal frontier", "250.0"):
        assert word in page
    assert re.search(r"alpha.*0\.[34]\d+", page)


def test_curves_at_equal_compute_are_those_that_were_measured() -> None:
    report = lab_report(trained(ladder(budget={"flops": [2e10, 2e11]})))
    base = report.scaling["base"]
    assert [len(curves) for curves in base.isoflops().values()] == [2, 2]  # a curve for each seed
    assert [len(curves[0]) for curves in base.isoflops().values()] == [3, 3]  # of three sizes
    assert "IsoFLOP curves of base, measured" in lab_page(report)


def test_on_one_ray_there_is_no_frontier() -> None:
    report = lab_report(trained(ladder(budget={"tokens_per_parameter": 20})))
    assert not report.scaling["base"].has_frontier
    assert "base: tokens per parameter were one number, so that the law holds at this number only" in report.notes
    assert "frontier" not in report.scaling["base"].to_dict()["fit"]
    assert "Compute-optimal" not in lab_page(report)


def test_arms_have_laws_and_verdicts_of_their_own() -> None:
    arms = {"alibi": {"swap": {"position": "alibi"}}}
    report = lab_report(
        trained(ladder(arms=arms, seeds={"at_least": 9, "at_most": 9}, budget={"tokens_per_parameter": [20, 80]}))
    )
    assert set(report.scaling) == {"base", "alibi"}
    assert {verdict.kind for verdict in report.verdicts.values()} == {"worse"}
    assert [verdict.interval.alpha for verdict in report.verdicts.values()] == [pytest.approx(0.05 / 6)] * 6
    ours, theirs = (report.scaling[name].fit for name in ("alibi", "base"))
    assert ours is not None
    assert theirs is not None
    assert pytest.approx(theirs.law.E + 0.1, abs=0.05) == ours.law.E


def test_the_ladder_of_the_docs_has_five_sizes_and_one_learning_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    arms = build_arms(read_design("docs/labs/ladder.yaml"))
    counts = [arm.costs.parameters for arm in arms.values()]
    assert counts == sorted(counts)
    assert len({*counts}) == 5
    assert len(counts) == 15
    assert {arm.rate_of for arm in arms.values()} == {next(iter(arms))}
    assert {arm.costs.parameters for arm in arms.values() if arm.held_out} == {max(counts)}
