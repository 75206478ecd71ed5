"""benchmarks/servers.py: declared faults are reported, rows count what happened, a server ends with its group."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def modules() -> Any:
    pytest.importorskip("transformers")
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import real_servers
        import servers
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
    return real_servers, servers


def test_every_declared_fault_has_a_report(modules: Any) -> None:
    real_servers, _ = modules
    headings = {line.removeprefix("### ") for line in (ROOT / "docs/upstream.md").read_text(encoding="utf-8").splitlines()}
    assert {fault for server in real_servers.SERVERS.values() for fault in server.faults.values()} <= headings


def test_a_law_that_fails_by_a_known_fault_is_no_false_alarm(modules: Any) -> None:
    real_servers, servers = modules
    laws = [{"law": "stops", "state": "failed"}, {"law": "cached", "state": "failed"}, {"law": "repeat", "state": "passed"}]
    judged = servers.judged(real_servers.SERVERS["mlx"], laws)
    run = servers.Run("mlx", "float32", 0, 12.0, judged, 0.0, (0.0, 0.0, 0.0), {})
    rows = {row.name: row.value for row in servers.rows_of([run])}
    assert rows["mlx, float32: false alarms"] == 1
    assert rows["mlx, float32: faults of the server"] == 1
    assert rows["clean law runs"] == 1


@pytest.mark.parametrize("text", ["the old mill", "a~b", "{[x]}"])
def test_a_text_of_characters_keeps_its_tokens_when_it_is_cut(modules: Any, text: str) -> None:
    engine = modules[0].characters()
    ids = engine.encode(text).ids
    assert len(ids) == len(text)
    assert engine.decode(ids[:2]) == text[:2]


def test_a_server_that_ends_at_once_is_an_error_with_its_log(modules: Any, tmp_path: Path) -> None:
    real_servers, _ = modules
    from dovetail.base.errors import FileError

    broken = real_servers.Server("broken", ("-c", "raise SystemExit('no such model')"), package="dovetail")
    with pytest.raises(FileError, match="no such model"), real_servers.running(broken, tmp_path, "float32", tmp_path / "log"):
        pass
