"""dovetail can-serve: the answer as a line, as JSON, and as an exit code."""

from __future__ import annotations

import json

import pytest

from dovetail.cli import main


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as stop:
        main(["can-serve", *args])
    return int(stop.value.code or 0), capsys.readouterr().out


def test_an_engine_that_can(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "mamba2-tiny") == (0, "vllm can serve mamba2-tiny\n")


def test_an_engine_that_cannot_names_the_part(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, "mamba2-hybrid-tiny")
    assert code == 3
    assert out.startswith("layers.3.mixer: heads of 28;")


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, "llama-tiny", "--engine", "native", "--tensor", "2", "--json")
    data = json.loads(out)
    assert (code, data["engine"], data["serves"]) == (3, "native", False)
    assert [reason["path"] for reason in data["reasons"]] == ["tp"]
