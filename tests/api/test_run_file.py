"""A run file: the settings of a run as YAML, by hand or as a run wrote it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import dovetail as dt
from dovetail.base.errors import FileError, UsageError
from dovetail.base.option import parameters
from dovetail.base.termination import Interrupt
from dovetail.base.units import read_count
from dovetail.cli import main
from dovetail.cli.command import command_of
from dovetail.disk.yaml import parse_yaml
from dovetail.training import metrics

SPEC = "{width: 28, vocab: 270, layers: [{repeat: 2, mixer: {heads: 2, kv_heads: 1, dropout: 0.1}, ffn: {hidden: 44}}]}"
RUN = f"""
spec: {SPEC}
text: tale.txt
tokens: 0.256k
batch: 4
length: 16
schedule: wsd
optimizer: muon
betas: [0.8, 0.9]
sample: 4
evals: 2
swap: [position=alibi]
set: ['layers.*.ffn.hidden=40']
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tale.txt").write_text("It was the best of times, it was the worst of times.\n" * 40, encoding="utf-8")
    (tmp_path / "my.yaml").write_text(RUN, encoding="utf-8")
    return tmp_path


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(["train", *args])
    return int(end.value.code or 0)


def settings(place: str) -> dict[str, Any]:
    return parse_yaml(Path(place, "run.yaml").read_text(), place)


def files(place: str) -> list[bytes]:
    last = sorted(Path(place, "checkpoints").iterdir())[-1] / "rank-00000.safetensors"
    return [Path(place, "model.safetensors").read_bytes(), last.read_bytes()]


def test_keys_are_arguments_and_the_resolved_file_repeats_the_run_bit_for_bit(capsys: pytest.CaptureFixture[str]) -> None:
    first = dt.train("my.yaml", out="first", quiet=True)
    assert len(first.history) == 4, "256 tokens in steps of 64"
    written = settings("first")
    assert written["run"] == 1
    assert {written[key] for key in ("schedule", "optimizer", "steps")} == {"wsd", "muon", 4}
    assert (written["betas"], written["evals"], written["sample"]) == ([0.8, 0.9], 2, 4)
    assert written["spec"]["layers"][0]["mixer"]["position"] == "alibi"
    assert dt.load_spec("first").layers[0].ffn.hidden == 40  # type: ignore[attr-defined]

    before = files("first")
    assert run("first/run.yaml", "-o", "first") == 0  # complete: nothing is trained
    assert "first: resuming" in capsys.readouterr().err
    assert run("first/run.yaml", "-o", "second") == 0
    assert files("second") == files("first") == before
    assert settings("second") == written


@pytest.mark.slow
def test_the_run_yaml_of_a_run_resumes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    dt.train("my.yaml", out="whole", quiet=True)
    with monkeypatch.context() as patch:
        patch.setattr(Interrupt, "__call__", lambda self: setattr(self, "received", True) or True)
        assert run("my.yaml", "-o", "broken") == 130
    assert run("broken/run.yaml") == 0
    assert files("broken") == files("whole")


def test_arguments_override_keys_even_with_their_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("my.yaml", "--schedule", "cosine", "--set", "run.seed=3", "--set=width=32", "-o", "other", "--json") == 0
    written = settings("other")
    assert (written["schedule"], written["seed"], written["spec"]["width"]) == ("cosine", 3, 32)
    assert written["spec"]["layers"][0]["mixer"]["position"] == "alibi", "the file's own changes come first"
    assert json.loads(capsys.readouterr().out)["steps"] == 4
    assert dt.train("my.yaml", steps=1, schedule="cosine", quiet=True, sample=0).history[0].step == 1


def test_a_mapping_is_a_run_file_too() -> None:
    data = parse_yaml(RUN, "run")
    found = dt.train({**data, "steps": 2}, quiet=True, set={"run.batch": 2})
    assert [metrics.tokens for metrics in found.history] == [32, 64]


def test_a_run_file_with_an_out_needs_no_flag(home: Path) -> None:
    (home / "my.yaml").write_text(RUN + "out: mine\n")
    assert run("my.yaml", "--steps=1") == 0
    assert (home / "mine" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("bach: 3", "my.yaml: bach: is not a key of a run; did you mean batch"),
        ("batch: many", "my.yaml: batch: 'many' is not a whole number"),
        ("batch: 4.5", "my.yaml: batch: 4.5 is not a whole number"),
        ("compile: 1", "my.yaml: compile: 1 is not true or false"),
        ("schedule: cosin", "my.yaml: schedule: 'cosin' is none of its values; did you mean cosine?"),
        ("betas: [0.9]", "is not a list of 2 numbers"),
        ("data: {a: 1}", "is not a list or a string"),
        ("run: 2", "run: 2 is not a format of run files"),
        ("note: print", "note: is not a key of a run"),
    ],
)
def test_wrong_keys_and_values_are_refused(home: Path, change: str, says: str) -> None:
    key = change.partition(":")[0]
    lines = [line for line in RUN.splitlines() if not line.startswith(f"{key}:")]
    (home / "my.yaml").write_text("\n".join([*lines, change]))
    with pytest.raises(FileError) as refused:
        dt.train("my.yaml", quiet=True)
    assert says in str(refused.value)


def test_wrong_settings_of_a_key_are_refused() -> None:
    with pytest.raises(UsageError, match=r"set run.bach: is not a key of a run; did you mean batch"):
        dt.train("my.yaml", set=["run.bach=3"], quiet=True)
    with pytest.raises(UsageError, match=r"set run.spec: is not a key of a run"):
        dt.train("my.yaml", set=["run.spec=llama-tiny"], quiet=True)
    with pytest.raises(UsageError, match=r"tokens: '12Q' is not a count"):
        dt.train("my.yaml", tokens="12Q", quiet=True)
    with pytest.raises(UsageError, match=r"ema: 2.0 is not from 0 to below 1"):
        dt.train("my.yaml", ema=2.0, quiet=True)


def test_data_that_has_changed_is_not_a_repeat(home: Path) -> None:
    dt.train("my.yaml", out="first", quiet=True)
    (home / "tale.txt").write_text("It was the age of wisdom, it was the age of foolishness.\n" * 40)
    with pytest.raises(FileError, match=r"tale.txt: has changed: the run file recorded SHA-256"):
        dt.train("first/run.yaml", out="second", quiet=True)
    (home / "other.txt").write_text((home / "tale.txt").read_text())
    assert dt.train("first/run.yaml", "other.txt", out="second", quiet=True).history, "other data under another name"


@pytest.mark.parametrize(
    ("text", "count"), [("200M", 2e8), ("1.5B", 1.5e9), ("2e8", 2e8), ("64k", 64e3), ("1T", 1e12), ("7", 7)]
)
def test_counts(text: str, count: float) -> None:
    assert read_count(text) == count


@pytest.mark.parametrize("text", ["", "M", "1.5G", "nan", "inf", "many"])
def test_what_is_no_count(text: str) -> None:
    with pytest.raises(ValueError, match="is not a count"):
        read_count(text)


def test_flags_of_the_command_are_keys_of_a_run_file() -> None:
    keys = {parameter.key for parameter in parameters(dt.train).values()}
    others = {"json", "load", "mup_check", "widths"}
    assert {option.key for option in command_of("train").options.values()} - others <= keys


@pytest.mark.parametrize("bf16_is_faster", [True, False])
def test_auto_precision_is_what_was_measured_and_is_recorded(bf16_is_faster: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(dtype: Any, device: Any) -> float:
        return 2e9 if (dtype.itemsize == 2) == bf16_is_faster else 1e9

    monkeypatch.setattr(metrics, "peak_flops", measured)
    dt.train("my.yaml", out="first", quiet=True, precision="auto", steps=1)
    assert settings("first")["precision"] == ("bf16" if bf16_is_faster else "fp32")
    monkeypatch.setattr(metrics, "peak_flops", lambda dtype, device: 1e9 * dtype.itemsize)
    again = dt.train("my.yaml", out="first", quiet=True, precision="auto", steps=1)
    assert len(again.history) == 1, "a resumed run keeps its precision, whatever is measured now"
