"""YAML read with care: bounded, without aliases or tags; an error names the line."""

from __future__ import annotations

from pathlib import Path

import pytest

from dovetail.core.errors import FileError, SpecError
from dovetail.io.yaml import LARGEST, dump_yaml, parse_yaml, read_text

LAUGHS = "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n"


def test_aliases_are_refused() -> None:
    with pytest.raises(SpecError, match="aliases are not read here"):
        parse_yaml(LAUGHS, "here")
    with pytest.raises(SpecError, match="aliases"):
        parse_yaml("mixer: &m {heads: 2}\ncross: *m\n", "here")
    assert parse_yaml("mixer: &m {heads: 2}\n", "here") == {"mixer": {"heads": 2}}  # a name nobody uses does no harm


def test_no_tag_makes_an_object() -> None:
    with pytest.raises(SpecError, match="line 1, column 4"):
        parse_yaml("a: !!python/object/apply:os.getcwd []\n", "here")


def test_a_syntax_error_names_file_line_and_column() -> None:
    with pytest.raises(SpecError) as refused:
        parse_yaml("width: 28\nlayers: [\n", "spec.yaml")
    assert refused.value.path == "spec.yaml line 3, column 1"
    assert refused.value.remedy == "check quotes, colons and indentation"


def test_depth_is_bounded() -> None:
    with pytest.raises(SpecError, match="nested too deeply"):
        parse_yaml("[" * 200_000, "here")  # at once: time must not grow with it


def test_size_and_encoding_are_bounded(tmp_path: Path) -> None:
    large, broken = tmp_path / "large.yaml", tmp_path / "broken.yaml"
    with large.open("wb") as file:
        file.truncate(LARGEST + 1)
    broken.write_bytes(b"\xff\xfe\x00")
    for path, words in ((large, "is larger than"), (broken, "cannot be read"), (tmp_path / "none.yaml", "cannot be read")):
        with pytest.raises(FileError, match=words) as refused:
            read_text(path)
        assert str(path) in str(refused.value)


def test_what_is_written_is_read_back_in_order() -> None:
    data = {"width": 28, "layers": [{"repeat": 2, "mixer": {"heads": 6}}], "head": None, "eps": 1e-06, "text": "no: yes"}
    assert list(parse_yaml(dump_yaml(data), "here").items()) == list(data.items())
