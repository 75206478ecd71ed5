"""plan: layouts that fit are traced, others are refused with their reason, and figures follow from the job."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import dovetail as dt
from dovetail.api.plans import TrainingPlan
from dovetail.base.errors import UsageError
from dovetail.cli import main

SPEC = """
width: 64
vocab: 128
layers: [{repeat: 4, mixer: {heads: 4, kv_heads: 2}, ffn: {hidden: 96}}]
"""


@pytest.fixture(scope="module")
def found() -> TrainingPlan:
    return dt.plan(SPEC, gpus=16, length=32, batch=64, tokens="1B", price=2.0, top=2)


def test_the_best_layout_fits_and_is_the_fastest(found: TrainingPlan) -> None:
    data = found.to_dict()
    assert data["best"] == data["layouts"][0]
    assert data["best"]["fits"]
    steps = [one["seconds"]["step"] for one in data["layouts"] if one["fits"]]
    assert steps == sorted(steps)
    assert len(steps) >= 2
    for one in data["layouts"]:
        sizes = one["layout"]
        assert sizes["pipeline"] * sizes["replicas"] * sizes["shards"] * sizes["sequence"] * sizes["tensor"] == 16
        memory = one["memory"]
        parts = memory["weights"] + memory["gradients"] + memory["optimizer"] + memory["activations"]
        assert parts == memory["peak"] <= memory["usable"]
        assert one["micro_batches"] * one["rows"] * sizes["replicas"] * sizes["shards"] == 64


def test_days_and_dollars_follow_from_the_step(found: TrainingPlan) -> None:
    data = found.to_dict()
    best, sure = data["best"], data["reliability"]
    seconds = 1e9 / (64 * 32) * best["seconds"]["step"] / sure["goodput"]
    assert best["days"] == pytest.approx(seconds / 86400)
    assert best["dollars"] == pytest.approx(seconds / 3600 * 16 * 2.0)
    assert sure["checkpoint_bytes"] == 12 * data["parameters"]


def test_refused_layouts_name_the_path(found: TrainingPlan) -> None:
    reasons = {one.reason for one in found.refused}
    assert any(re.search(r"layers\.0\.mixer\S* .*tensor-parallel ranks", reason) for reason in reasons)
    assert not any(one.layout.tensor == 8 for one in found.layouts)


def test_text_names_the_best_layout_and_the_assumptions(found: TrainingPlan) -> None:
    text = str(found)
    assert "best" in text
    assert "memory per rank" in text
    assert "GPU-hours (Llama 3 405B)" in text


class _Balanced(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.add(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_has_a_picture_and_fetches_nothing(found: TrainingPlan) -> None:
    page, parser = found.to_html(), _Balanced()
    parser.feed(page)
    assert parser.open == []
    assert {"svg", "table", "details"} <= parser.seen
    assert not re.search(r"(src|href)=|url\(|@import", page)


@pytest.mark.slow
def test_an_axis_can_be_fixed() -> None:
    untied = SPEC + "head: {kind: lm, tied: false}\n"
    found = dt.plan(untied, gpus=8, length=32, batch=64, tensor=2, pipeline=2, shards=2, sequence=1, recompute="none", top=1)
    assert found.best is not None
    layout, setting = found.best.layout, found.best.setting
    assert (layout.tensor, layout.pipeline, layout.shards, layout.replicas) == (2, 2, 2, 1)
    assert found.best.seconds.bubble == pytest.approx(
        (found.best.seconds.compute + found.best.seconds.exposed) / setting.micro_batches
    )


@pytest.mark.slow
def test_no_advice_of_torch_stands_between_the_lines() -> None:
    """The norm of gradients on a mesh of two dimensions logged a paragraph on how to build meshes."""
    flags = ("--gpus", "8", "--batch", "64", "--length", "128", "--tensor", "2", "--top", "1")
    command = [sys.executable, "-m", "dovetail", "plan", "llama-tiny", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=True)
    assert done.stderr.splitlines() == ["tracing tensor 2 × shards 4"]


def test_a_tied_head_is_on_the_stage_of_the_embedding() -> None:
    found = dt.plan(SPEC, gpus=4, length=32, batch=64, pipeline=2, top=1)
    assert found.best is None
    assert {one.reason.partition(":")[0] for one in found.refused} == {"head.out.weight"}


@pytest.mark.slow
def test_a_model_that_is_too_large_fits_nowhere() -> None:
    found = dt.plan("llama-3-405b", gpus=8, length=8192, batch=8)
    assert found.best is None
    assert found.layouts == ()
    assert all("per rank at the least" in one.reason or "cannot" in one.reason for one in found.refused)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"gpus": 0}, UsageError, "gpus: 0 is not from 1 to"),
        ({"gpus": 8, "device": "h1"}, UsageError, "device: 'h1' is not known"),
        ({"gpus": 8, "tokens": "many"}, UsageError, "tokens"),
        ({"gpus": 8, "length": 2**30}, UsageError, "length: 1,073,741,824 is not from 1 to"),
    ],
)
def test_wrong_arguments_are_refused(options: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        dt.plan(SPEC, **options)


@pytest.mark.slow
def test_the_verb_prints_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC)
    flags = ["--gpus", "4", "--length", "32", "--batch", "8", "--tensor", "2", "--top", "1", "--json"]
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(tmp_path / "spec.yaml"), *flags, "--html", str(tmp_path / "page.html")])
    assert ended.value.code == 0
    data = json.loads(capsys.readouterr().out)
    assert data["best"]["layout"]["tensor"] == 2
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
