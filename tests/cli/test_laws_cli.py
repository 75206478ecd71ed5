"""dovetail laws on one spec: changed first, some laws alone, and what makes no sense refused."""

from __future__ import annotations

import json

import pytest

from dovetail.cli import main


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(["laws", *args])
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


def test_a_changed_spec_is_what_is_tried(capsys: pytest.CaptureFixture[str]) -> None:
    small = ("--set", "width=24", "--set", "vocab=40", "--set", "layers.*.mixer.head=4", "--set", "layers.*.ffn.hidden=20")
    code, out, _ = run(capsys, "llama-tiny", *small, "--only", "ported", "--json")
    (held,) = json.loads(out)["laws"]
    assert (code, held["law"], held["state"]) == (0, "ported", "passed")
    code, out, _ = run(capsys, "llama-tiny", *small, "--swap", "position=alibi", "--only", "ported", "--json")
    (told,) = json.loads(out)["laws"]
    assert (code, told["state"]) == (0, "not applicable")  # no family has a Llama with ALiBi
    assert "alibi" in told["detail"]


def test_what_makes_no_sense_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--swap", "position=alibi")[0] == 3
    code, _, err = run(capsys, "py:nowhere.py:model", "--set", "width=24")
    assert code == 3
    assert "name one: dovetail laws SPEC --swap" in err
    code, _, err = run(capsys, "llama-tiny", "--only", "cuasal")
    assert code == 4
    assert "'cuasal'" in err
    assert "causal" in err
