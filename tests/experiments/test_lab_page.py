"""The report of a lab as text and as a page, and charts with bands: from data, without training."""

from __future__ import annotations

import dataclasses as dc
import re
from pathlib import Path

import pytest
from lab_designs import lab

from dovetail.experiments.arms import build_arms
from dovetail.experiments.design import read_design
from dovetail.experiments.report import LabReport, RunRow, plain_design
from dovetail.experiments.results import TrainedRun
from dovetail.experiments.verdict import judge
from dovetail.views.blocks import result_text
from dovetail.views.chart import CANVAS, band_chart
from dovetail.views.lab import WIDTH, forest, lab_page, lab_view


@pytest.fixture(scope="module")
def report() -> LabReport:
    arms = {"gqa": {"set": {"layers.*.mixer.kv_heads": 2}}, "one": {"on": "gqa", "set": {"layers.*.mixer.kv_heads": 1}}}
    design = read_design(lab(arms=arms, smallest=0.05, match="params"))
    losses = {
        "base": [2.0, 2.1, 2.2, 2.0, 2.15, 2.1],
        "gqa": [2.2, 2.301, 2.399, 2.2, 2.351, 2.3],
        "one": [2.21, 2.2, 2.5, 2.0, 2.4, 2.3],
    }
    verdicts = {
        name: judge(losses[name], losses[on], smallest=0.05, at_least=6, comparisons=2)
        for name, on in (("gqa", "base"), ("one", "gqa"))
    }
    rows = [
        RunRow(
            name, seed, 0.01, False, loss, TrainedRun(f"{name}-{seed}", {"seconds": 3.0}, ((10, 1, loss + 1), (20, 2, loss)))
        )
        for name, some in losses.items()
        for seed, loss in enumerate(some)
    ]
    sweeps = {name: {0.001: [2.5], 0.01: [2.0], 0.1: [2.4]} for name in losses}
    rates = dict.fromkeys(losses, 0.01)
    return LabReport(
        verdicts,
        build_arms(design),
        tuple(rows),
        sweeps,
        rates,
        {"gqa": 0.5, "one": 0.25},
        dict.fromkeys(losses, 3.0),
        "val_loss",
        0.05,
        0.95,
        "params",
        Path("out"),
        {"plays.txt": "0" * 64},
        plain_design(design),
    )


def test_the_text_has_verdicts_costs_and_changes(report: LabReport) -> None:
    text = " ".join(result_text(lambda width: lab_view(report)).split())  # whatever the width
    assert re.search(r"gqa +base +worse by 0\.2002 \(\+0\.19\d+ to \+0\.20\d+\) at 6 seeds", text)
    assert re.search(r"one +gqa +unresolved: .* more would be needed", text)
    assert "gqa: layers.*.mixer.kv_heads 4 → 2" in text
    assert "(solved for equal params)" in text
    assert "note:" not in text


def test_notes_name_what_weakens_the_verdicts(report: LabReport) -> None:
    edge = dc.replace(report, rates={**report.rates, "gqa": 0.1}, match=None)
    assert edge.notes == [
        "gqa: the best learning rate, 0.1, is at an end of the range that was tried; widen it",
        "the costs of the arms were not matched",
    ]
    untuned = dc.replace(report, sweeps={name: {} for name in report.arms})
    assert untuned.notes == ["no learning rate was tuned: the verdicts hold at this one"]


def test_the_forest_plot_is_to_scale(report: LabReport) -> None:
    rows, zero, band, reach = forest(report)
    assert (zero, [row.kind for row in rows]) == (WIDTH / 2, ["worse", "unresolved"])
    middle = (rows[0].middle - zero) / (WIDTH / 2) * reach
    assert middle == pytest.approx(report.verdicts["gqa"].interval.mean, abs=0.01)
    assert (band[1] - zero) / (WIDTH / 2) * reach == pytest.approx(0.05, abs=0.01)
    assert rows[0].left > zero > rows[1].left
    assert rows[0].y < rows[1].y


def test_the_page_has_every_verdict_and_what_repeats_it(report: LabReport) -> None:
    page = lab_page(report)
    for verdict in report.verdicts.values():
        assert str(verdict) in page
    assert page.count("<polyline") == 4 * 3
    assert page.count("<polygon") == 4 * 3
    assert all(f"{row.run.name}" in page for row in report.runs)
    for word in ('class="badge worse"', "SHA-256", "kv_heads: 2", "torch", "pairing saves", "lower is better"):
        assert word in page


def test_a_page_of_a_lab_that_has_just_begun(report: LabReport) -> None:
    page = lab_page(dc.replace(report, verdicts={}, runs=(), sweeps={}))
    assert "No arm has a seed yet" in page
    assert "<svg" not in page


def test_a_chart_is_the_mean_with_its_range() -> None:
    chart = band_chart("t", "x", "y", {"a": [[(0, 1.0), (10, 0.0)], [(0, 3.0), (10, 2.0)]], "b": [[(0, 2.0), (5, 3.0)]]})
    assert chart is not None
    a, b = chart.bands
    width, height = CANVAS
    assert a.line == f"0.0,{height / 3:.1f} {width:.1f},{height * 2 / 3:.1f}"
    assert a.area.split() == [
        f"0.0,{0:.1f}",
        f"{width:.1f},{height / 3:.1f}",
        f"{width:.1f},{height:.1f}",
        f"0.0,{height * 2 / 3:.1f}",
    ]
    assert b.line.split()[1] == f"{width / 2:.1f},0.0"
    assert (chart.low, chart.high, chart.left, chart.right) == ("0.000", "3.000", "0", "10")
    assert a.hue != b.hue


def test_a_logarithmic_axis_and_what_cannot_be_drawn() -> None:
    chart = band_chart("t", "x", "y", {"a": [[(0.001, 1.0), (0.01, 2.0), (0.1, 1.0)]]}, logarithmic=True)
    assert chart is not None
    assert chart.bands[0].line.split()[1] == f"{CANVAS[0] / 2:.1f},0.0"
    assert (chart.left, chart.right) == ("0.001", "0.1")
    assert band_chart("t", "x", "y", {"a": [[(1, 1.0)]]}) is None
    assert band_chart("t", "x", "y", {}) is None
    skipped = band_chart("t", "x", "y", {"a": [[(0, float("nan")), (1, 1.0), (2, 2.0)]]})
    assert skipped is not None
    assert (skipped.left, skipped.right) == ("1", "2")
