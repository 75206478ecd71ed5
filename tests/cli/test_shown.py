"""What a verb shows, as a page: one file that needs nothing beside it, with names that cannot break it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dovetail.cli import main


def answers(*args: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(list(args))
    return int(stop.value.code or 0)


def test_show_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert answers("show", "llama-tiny", "--html", str(page)) == 0
    text = page.read_text(encoding="utf-8")
    assert "<title>dovetail show llama-tiny</title>" in text
    count = capsys.readouterr().out.split(" parameters")[0].split()[-1]
    assert f">{count}<" in text
    assert "http" not in text  # nothing is fetched


def test_diff_writes_a_page_beside_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert answers("diff", "llama-tiny", "llama-tiny", "--swap", "position=alibi", "--json", "--html", str(page)) == 0
    assert capsys.readouterr().out.startswith("{")
    assert "reinterpreted" in page.read_text(encoding="utf-8")


def test_a_page_that_cannot_be_written_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "nowhere" / "page.html"
    assert answers("show", "llama-tiny", "--html", str(page)) == 4
    assert f"{page}: cannot be written (No such file or directory)" in capsys.readouterr().err
