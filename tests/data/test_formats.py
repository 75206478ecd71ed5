"""Documents of text, JSON Lines and Parquet: the same whatever the spans, and errors with file and line."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from dovetail.base.errors import FileError, UsageError
from dovetail.data import formats
from dovetail.data.formats import FORMATS, ReadOptions, Text, format_of
from dovetail.data.plan import BuildSettings, expand, make_plan

RANDOM = random.Random(3)
ROWS = ["", "one", "naïve\ttext", "a" * 50, "two\r", "  ", "日本語", "—", "end"] * 6
RANDOM.shuffle(ROWS)


def documents(path: Path, target: int, options: ReadOptions) -> list[str]:
    kind = format_of(path, None)
    spans = kind.spans(path, path.stat().st_size, target, options)
    return [text for span in spans for text in kind.documents(path, span.start, span.stop, options)]


@pytest.mark.parametrize("target", [1, 2, 7, 40, 10**6])
@pytest.mark.parametrize("end", ["\n", ""])
def test_lines_in_any_spans(tmp_path: Path, target: int, end: str) -> None:
    path = tmp_path / "rows.txt"
    path.write_bytes(("\n".join(ROWS) + end).encode())
    expected = [row.removesuffix("\r") for row in ROWS[:-1]] + [ROWS[-1]]
    assert documents(path, target, ReadOptions(lines=True)) == expected


@pytest.mark.parametrize("target", [1, 3, 11, 10**6])
@pytest.mark.parametrize("separator", ["", "<|end|>"])
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_separated_documents_in_any_spans(tmp_path: Path, target: int, separator: str, line_end: str) -> None:
    texts = ["one", "two\nlines", "naïve", "four\nmore\nlines", "x"]
    path = tmp_path / "stories.txt"
    path.write_bytes(f"\n{separator}\n".join(texts).replace("\n", line_end).encode())
    assert documents(path, target, ReadOptions(separator=separator)) == texts


def test_blank_lines_in_a_row_give_empty_documents(tmp_path: Path) -> None:
    path = tmp_path / "stories.txt"
    path.write_text("\none\n\n\n\ntwo\n\n")
    for target in (1, 2, 3, 5, 100):
        assert [text for text in documents(path, target, ReadOptions(separator="")) if text] == ["one", "two"]


def test_a_text_file_is_one_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "play.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\n\ntwo\n")
    assert documents(path, 1, ReadOptions()) == ["one\n\ntwo\n"]
    assert documents(path, 1, ReadOptions(lines=True)) == ["one", "", "two"]
    monkeypatch.setattr(formats, "TEXT_BYTES", 8)
    with pytest.raises(FileError, match=r"play\.txt: is longer than 8 bytes, the limit for a document; cut it .*--lines"):
        documents(path, 1, ReadOptions())
    monkeypatch.setattr(formats, "TEXT_BYTES", 4)
    with pytest.raises(FileError, match=r"play\.txt:1: is longer than 4 bytes, the limit for a line"):
        documents(path, 1, ReadOptions(lines=True))
    path.write_text("\n-\n1\n2\n3\n")
    with pytest.raises(FileError, match=r"play\.txt:3: begins a document of more than 4 bytes"):
        documents(path, 1, ReadOptions(separator="-"))


@pytest.mark.parametrize("target", [1, 9, 30, 10**6])
def test_json_lines_in_any_spans(tmp_path: Path, target: int) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{json.dumps({'body': row, 'n': 1})}\n{' ' if row == 'one' else ''}\n" for row in ROWS))
    assert documents(path, target, ReadOptions(field="body")) == ROWS


BAD_LINES = {
    '{"text": "a"': "is not JSON",
    "[" * 100_000: "is not JSON",
    '["text"]': "is not a JSON object",
    '{"body": "a", "id": 3}': r"has no field 'text'; its fields are 'body', 'id': choose one with --field",
    '{"text": 3}': "its field 'text' is int, not a string",
    '{"text": null}': "its field 'text' is NoneType",
    '{"text": "\\ud800"}': "its field 'text' holds a lone surrogate",
    '{"text": "caf\xe9"}': r"is not UTF-8 \(invalid continuation byte\)",
}


@pytest.mark.parametrize("line", BAD_LINES, ids=range(len(BAD_LINES)))
@pytest.mark.parametrize("target", [20, 10**7])
def test_a_bad_line_is_named(tmp_path: Path, line: str, target: int) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "good"}\n' * 6 + line.encode("latin1") + b'\n{"text": "good"}\n')
    with pytest.raises(FileError, match=rf"rows\.jsonl:7: {BAD_LINES[line]}"):
        documents(path, target, ReadOptions())


@pytest.mark.parametrize("options", [ReadOptions(), ReadOptions(lines=True), ReadOptions(separator="")])
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_text_that_is_not_utf8_is_named_by_line(tmp_path: Path, options: ReadOptions, line_end: bytes) -> None:
    path = tmp_path / "rows.txt"
    path.write_bytes(line_end.join([b"one", b"two", b"", b"three", b"caf\xe9", b"four"]))
    for target in (4, 100):
        with pytest.raises(FileError, match=r"rows\.txt:5: is not UTF-8"):
            documents(path, target, options)


def test_parquet_in_any_spans(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    import pyarrow
    import pyarrow.parquet as parquet

    path = tmp_path / "rows.parquet"
    table = pyarrow.table({"body": ROWS, "n": range(len(ROWS))})
    parquet.write_table(table, path, row_group_size=5)
    for target in (1, 200, 10**6):
        assert documents(path, target, ReadOptions(field="body")) == ROWS
    assert len(FORMATS["parquet"].spans(path, 0, 1, ReadOptions(field="body"))) == -(-len(ROWS) // 5)
    with pytest.raises(FileError, match=r"rows\.parquet: has no column 'text'; its columns are 'body', 'n'"):
        documents(path, 1, ReadOptions())
    with pytest.raises(FileError, match=r"rows\.parquet: row 1 of 'n' is int, not a string"):
        documents(path, 1, ReadOptions(field="n"))
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(FileError, match=r"rows\.parquet: cannot be read as Parquet"):
        documents(path, 1, ReadOptions(field="body"))


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    with pytest.raises(FileError, match=r'rows\.parquet: Parquet is read with pyarrow: pip install "dovetail-lm\[data\]"'):
        documents(tmp_path / "rows.parquet", 1, ReadOptions())


def test_formats_are_known_by_suffix_or_by_name(tmp_path: Path) -> None:
    assert format_of(Path("a.TXT"), None).name == "text"
    assert isinstance(format_of(Path("a.log"), "text"), Text)
    with pytest.raises(FileError, match=r"a\.log: its format is not known by its suffix .*--format"):
        format_of(Path("a.log"), None)
    with pytest.raises(UsageError, match=r"unknown format 'json'; did you mean jsonl"):
        format_of(Path("a.log"), "json")


# -- inputs and units -------------------------------------------------------------------------------------------------------


def test_inputs_are_files_directories_and_globs(tmp_path: Path) -> None:
    names = ["b.txt", "a.txt", "in/c.txt", "in/deep/d.jsonl"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")

    def found(*inputs: str) -> list[str]:
        return [str(path.relative_to(tmp_path)) for path in expand([tmp_path / given for given in inputs])]

    assert found("b.txt", "*.txt") == ["b.txt", "a.txt"]
    assert found("in") == ["in/c.txt", "in/deep/d.jsonl"]
    assert found("**/*.txt") == ["a.txt", "b.txt", "in/c.txt"]
    (tmp_path / "odd[1].txt").write_text("x")
    assert found("odd[1].txt") == ["odd[1].txt"]  # a file of this name, not a pattern
    for missing in ("none.txt", "*.csv"):
        with pytest.raises(FileError, match="no such file, and no file matches it as a pattern"):
            found(missing)


def test_units_are_of_about_equal_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dovetail.data.plan.UNIT_BYTES", (100, 10_000))
    for i in range(60):
        (tmp_path / f"{i:02d}.txt").write_text("x" * 7)
    (tmp_path / "long.jsonl").write_text('{"text": "x"}\n' * 100)
    settings = BuildSettings("0", 258, 0, ReadOptions(), False, 0.0)
    plan = make_plan(expand([tmp_path]), settings)
    assert plan.bytes == 60 * 7 + 1400
    assert all(unit.size <= 150 for unit in plan.units)
    assert 13 <= len(plan.units) <= 30
    assert type(plan).from_json(plan.to_json()) == plan
