"""A run of the suite that is killed is continued from its record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dovetail.base.errors import FileError
from dovetail.proof.laws import record as record_module
from dovetail.proof.laws.law import Laws, Outcome
from dovetail.proof.laws.record import Record

FOUND = [Outcome("causal", "passed", "", 0.5, [("rope", "a reason")]), Outcome("padded", "not applicable", "no rows")]


def test_a_record_gives_back_what_was_added(tmp_path: Path) -> None:
    path = tmp_path / "laws.jsonl"
    Record(path, seed=1).add("width: 8", FOUND)
    again = Record(path, seed=1)
    assert again.outcomes == {"width: 8": FOUND}
    again.add("width: 9", [])
    assert set(Record(path, seed=1).outcomes) == {"width: 8", "width: 9"}


def test_a_line_that_was_cut_off_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "laws.jsonl"
    one = Record(path)
    one.add("width: 8", FOUND)
    one.add("width: 9", FOUND)
    path.write_bytes(path.read_bytes()[:-20])
    again = Record(path)
    assert set(again.outcomes) == {"width: 8"}
    again.add("width: 10", FOUND)  # not behind half a line
    assert set(Record(path).outcomes) == {"width: 8", "width: 10"}


def test_other_options_and_other_sources_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "laws.jsonl"
    Record(path, seed=0)
    with pytest.raises(FileError, match="other sources or options"):
        Record(path, seed=1)
    monkeypatch.setattr(record_module, "sources", lambda: "another")
    with pytest.raises(FileError, match="other sources or options"):
        Record(path, seed=0)


@pytest.mark.slow
def test_the_suite_takes_recorded_outcomes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dovetail.files.spec import load_spec, to_yaml
    from dovetail.proof.laws import suite

    spec = load_spec("llama-tiny")
    monkeypatch.setattr(suite, "specs_of", lambda *_: iter([(spec, "pairs")]))
    monkeypatch.setattr(suite, "check_oracles", lambda _: [])
    monkeypatch.setattr(suite, "LAWS", Laws(causal=suite.LAWS["causal"]))
    path = tmp_path / "laws.jsonl"
    first = suite.run_suite(record=path)
    assert first.failures == []
    lines = path.read_text().splitlines()
    data = json.loads(lines[1])
    assert data["spec"] == to_yaml(spec)
    assert [row["law"] for row in data["outcomes"]] == ["causal"]
    data["outcomes"][0] |= {"state": "failed", "detail": "as recorded"}
    path.write_text(f"{lines[0]}\n{json.dumps(data)}\n")
    assert [one["detail"] for one in suite.run_suite(record=path).failures] == ["as recorded"]
