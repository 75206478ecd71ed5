"""dovetail parts: the whole registry, as data and as a table."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dovetail.cli import main
from dovetail.nn.groups import GROUPS
from dovetail.spec.part import KINDS


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(["parts", *args])
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


def listed(capsys: pytest.CaptureFixture[str], *args: str) -> list[dict[str, Any]]:
    code, out, _ = run(capsys, *args, "--json")
    assert code == 0
    return json.loads(out)


def test_all_parts_are_there(capsys: pytest.CaptureFixture[str]) -> None:
    found = listed(capsys)
    groups = {group.group for group in GROUPS}
    assert {part["kind"] for part in found} == {kind for kind, part in KINDS.items() if part.group in groups}
    assert {part["group"] for part in found} == groups
    assert len(found) >= 35
    assert not {"block", "model"} & {part["kind"] for part in found}
    for part in found:
        assert set(part) == {"kind", "group", "summary", "fields"}
        assert part["summary"].endswith((".", ")")), part["kind"]
        assert all(set(field) == {"name", "type", "default"} for field in part["fields"])


def test_fields_have_type_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    rope = next(part for part in listed(capsys, "--group", "position") if part["kind"] == "rope")
    assert rope["summary"] == "Rotary position embedding of queries and keys."
    assert rope["fields"] == [
        {"name": "base", "type": "float", "default": 10000.0},
        {"name": "fraction", "type": "float", "default": 1.0},
        {"name": "pairs", "type": "half|adjacent", "default": "half"},
        {"name": "coords", "type": "int", "default": 1},
        {"name": "sections", "type": "list of int", "default": []},
        {"name": "when", "type": "write|read", "default": "write"},
        {"name": "scaling", "type": "scaling | null", "default": None},
    ]
    joined = next(part for part in listed(capsys, "--group", "mask") if part["kind"] == "all_of")
    assert joined["fields"] == [{"name": "masks", "type": "list of mask", "default": []}]


def test_one_group_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert [part["kind"] for part in listed(capsys, "--group", "wire")] == [
        "mhc",
        "parallel",
        "post_norm",
        "pre_norm",
        "res_post_norm",
        "sandwich_norm",
    ]
    code, out, _ = run(capsys, "--group", "wire")
    assert code == 0
    assert "wire 6" in out
    assert "x + norm(f(norm x))" in out
    assert "rope" not in out


def test_an_unknown_group_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--group", "glue")
    assert (code, out) == (3, "")
    assert "'glue' is not a group of parts" in err
    assert "scaling" in err
