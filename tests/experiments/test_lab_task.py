"""A lab on a synthetic task: the runs are found by its fields, and the metric is the accuracy of its answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lab_designs import lab

import dovetail as dt
from dovetail.base.errors import DovetailError, FileError, SpecError
from dovetail.experiments.arms import build_arms
from dovetail.experiments.design import read_design
from dovetail.experiments.lab_runs import digests, request

DESIGN = lab(data={"task": {"kind": "mqar", "pairs": 2}}, metric="accuracy", budget={"steps": 3})


def key(**keys: object) -> str:
    design = read_design({**DESIGN, **keys})
    return request(design, build_arms(design)["base"], 0, None, False, digests(design)).key


def test_a_run_is_found_by_the_fields_of_its_task() -> None:
    assert read_design(DESIGN).higher_is_better
    assert key() == key(data={"task": "{kind: mqar, pairs: 2}"})
    assert key() != key(data={"task": {"kind": "mqar", "pairs": 3}})
    assert key(data={"task": "mqar"}) == key(data={"task": {"kind": "mqar", "pairs": 8}})
    with pytest.raises(SpecError, match=r"data.task: no part is called 'mqr'"):
        key(data={"task": "mqr"})
    with pytest.raises(FileError, match="give text, data or task"):
        read_design({**DESIGN, "data": {}})


@pytest.mark.slow
def test_the_metric_of_a_lab_is_the_accuracy(tmp_path: Path) -> None:
    train = {"batch": 4, "length": 16, "evals": 1}
    design = {**DESIGN, "train": train, "seeds": {"at_least": 2, "at_most": 2}, "arms": {"gqa": DESIGN["arms"]["gqa"]}}
    result = dt.lab(design, out=tmp_path / "lab", workers=1)
    rows = [row for row in result.report.runs if row.arm == "base"]
    for row in rows:
        report = json.loads((tmp_path / "lab" / "runs" / f"{row.run.name}.json").read_text(encoding="utf-8"))["report"]
        assert row.value == report["held_out_accuracy"]
    assert len(rows) == 2


PROBE = {"tasks": [{"kind": "multi_key", "pairs": 2}], "lengths": [12, 24], "depths": [0.0, 1.0], "rows": 4}


def test_a_probe_is_read_with_the_design_and_determines_the_run() -> None:
    design = read_design({**DESIGN, "metric": "used_length", "probe": PROBE})
    assert design.higher_is_better
    assert design.probe is not None
    assert design.probe["lengths"] == [12, 24]
    assert key(probe=PROBE) != key() != key(probe={**PROBE, "rows": 5})
    for keys, message in (
        ({"metric": "used_length"}, "metric: used_length is of a probe; also give `probe`"),
        ({"probe": {"tasks": ["neddle"]}}, "no part is called 'neddle'"),
        ({"probe": {"length": [3]}}, r"probe.length: is not a key; keys: tasks, lengths"),
        ({"probe": {"lengths": 64}}, "probe.lengths: 64 is not"),
        ({"probe": 3}, "probe: '3' is not a mapping"),
    ):
        with pytest.raises(DovetailError, match=message):
            read_design({**DESIGN, **keys})


@pytest.mark.slow
def test_the_metric_of_a_lab_is_that_of_probing_the_trained_model(tmp_path: Path) -> None:
    train = {"batch": 4, "length": 16, "evals": 1}
    design = {**DESIGN, "train": train, "seeds": {"at_least": 2, "at_most": 2}, "arms": {"gqa": DESIGN["arms"]["gqa"]}}
    result = dt.lab({**design, "metric": "probe_accuracy", "probe": PROBE}, out=tmp_path / "lab", workers=1)
    for row in result.report.runs:
        model = dt.load(tmp_path / "lab" / "runs" / row.run.name)
        again = dt.probe(model, task=PROBE["tasks"], lengths=[12, 24], depths=[0.0, 1.0], rows=4).report
        assert row.value == again.accuracy()
        assert row.run.report["probe_used_length"] == again.used()
