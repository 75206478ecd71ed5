"""`dovetail look`: findings with the line that tests each, and what a training run did."""

from __future__ import annotations

import dataclasses as dc
import json
from pathlib import Path

import pytest

import dovetail as dt
from dovetail.cli import main
from dovetail.training.dynamics import spikes
from dovetail.training.metrics import StepMetrics

TEXT = "".join(
    f"The {a} fox number {i} jumps over the {b} dog.\n" for i, (a, b) in enumerate([("red", "lazy"), ("old", "sad")] * 150)
)
SPEC = "width: 32\nlayers: [{repeat: 2, mixer: {heads: 4, head: 8}, ffn: {hidden: 48}}]"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("look")
    (place / "text.txt").write_text(TEXT)
    dt.train(SPEC, place / "text.txt", steps=24, batch=2, length=32, out=place / "run", quiet=True)
    return place


def look(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(["look", *map(str, args)])
    out, err = capsys.readouterr()
    return int(str(ended.value.code)), out, err


def test_every_suggested_line_runs(run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run)
    words = ("run", "--text", "text.txt", "--rows", 4, "--length", 32)
    code, out, _ = look(capsys, *words, "--html", "page.html")
    assert code == 0
    code, text, _ = look(capsys, *words, "--json")
    data, scope = json.loads(text), dict[str, object]()
    exec(data["setup"], scope)
    assert data["findings"], "random attention is uniform"
    for finding in data["findings"]:
        assert repr(eval(finding["test"], scope)).startswith("layers.")
        assert finding["test"] in out
    assert f"first:  {data['setup']}" in out
    assert "tested by" in (run / "page.html").read_text()


def test_a_run_is_read(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = look(capsys, run / "run")
    assert code == 0
    assert "no spikes" in out
    assert "appears in no checkpoint" in out
    data = dt.look.report(run / "run").to_dict()
    assert data["checkpoints"][-1]["step"] == 24
    assert 0 < data["checkpoints"][-1]["entropy"] <= 1
    assert "row entropy" in dt.look.report(run / "run").to_html()


def test_what_is_neither_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = look(capsys, run)
    assert (code, "give --text FILE" in err) == (2, True)
    code, _, err = look(capsys, run / "nowhere")
    assert (code, "no such directory" in err) == (4, True)


def test_spikes_have_their_steps() -> None:
    steps = [
        StepMetrics(i + 1, 4 - 0.01 * i + 0.05 * (i % 3), 1e-3, 100 * i, float(i), grad_norm=1.0 + 0.1 * (i % 5))
        for i in range(60)
    ]
    assert spikes(steps) == []
    steps[40] = dc.replace(steps[40], loss=6.5, grad_norm=float("inf"))
    assert [(spike.step, spike.what) for spike in spikes(steps)] == [(41, "gradient norm"), (41, "loss")]
