"""YAML read safely: bounded, without aliases, tags or duplicate keys, by the core schema of YAML 1.2; an error names the
line."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from dovetail.base.errors import FileError, SpecError
from dovetail.base.limits import SPEC_BYTES, SPEC_FIELDS, SPEC_ITEMS, SPEC_LAYERS
from dovetail.disk import yaml as reader
from dovetail.disk.yaml import dump_yaml, parse_yaml, read_text
from dovetail.files.spec import from_yaml
from dovetail.spec.check import check

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
        file.truncate(SPEC_BYTES + 1)
    broken.write_bytes(b"\xff\xfe\x00")
    for path, words in (
        (large, "the limit for a spec is"),
        (broken, "byte 0 is not UTF-8"),
        (tmp_path / "none.yaml", "cannot be read"),
    ):
        with pytest.raises(FileError, match=words) as refused:
            read_text(path)
        assert str(path) in str(refused.value)


def test_written_entries_are_read_back_in_order() -> None:
    data = {"width": 28, "layers": [{"repeat": 2, "mixer": {"heads": 6}}], "head": None, "eps": 1e-06, "text": "no: yes"}
    assert list(parse_yaml(dump_yaml(data), "here").items()) == list(data.items())


@pytest.fixture(params=["libyaml", "pure Python"])
def parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both parsers of PyYAML give the same events."""
    if request.param == "pure Python":
        monkeypatch.setattr(reader, "LOADER", yaml.SafeLoader)
    elif not yaml.__with_libyaml__:
        pytest.skip("PyYAML is built without libyaml")
    return request.param


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("null", None),
        ("~", None),
        ("", None),
        ("true", True),
        ("False", False),
        ("yes", "yes"),
        ("No", "No"),
        ("on", "on"),
        ("off", "off"),
        ("y", "y"),
        ("12", 12),
        ("-7", -7),
        ("+7", 7),
        ("010", 10),
        ("0o17", 15),
        ("0x1F", 31),
        ("0b11", "0b11"),
        ("1:30", "1:30"),
        ("190:20:30", "190:20:30"),
        ("190:20:30.15", "190:20:30.15"),
        ("1_000", "1_000"),
        ("1_000.5", "1_000.5"),
        ("2024-01-01", "2024-01-01"),
        ("2024-01-01 10:00:00", "2024-01-01 10:00:00"),
        ("1.5", 1.5),
        (".5", 0.5),
        ("1.", 1.0),
        ("1e-5", 1e-5),
        ("1E5", 1e5),
        ("-1.5e+3", -1500.0),
        ("inf", "inf"),
        ("nan", "nan"),
        ("=", "="),
        ("'12'", "12"),
        ('"true"', "true"),
        ("9223372036854775807", 2**63 - 1),
    ],
)
def test_scalars_follow_the_core_schema(text: str, value: Any, parser: str) -> None:
    data = parse_yaml(f"a: {text}\n", "here")
    assert data == {"a": value}
    assert type(data["a"]) is type(value)
    assert parse_yaml(dump_yaml(data), "here") == data


def test_a_merge_key_is_a_plain_key(parser: str) -> None:
    assert parse_yaml("<<: {a: 1}\nb: 2\n", "here") == {"<<": {"a": 1}, "b": 2}


@pytest.mark.parametrize("text", [".nan", ".NaN", ".inf", "-.inf", "+.Inf", "1e999", "-1e400"])
def test_numbers_that_are_not_finite_are_refused(text: str, parser: str) -> None:
    with pytest.raises(SpecError, match="is not a finite number") as refused:
        parse_yaml(f"eps: 1\nbase: {text}\n", "here")
    assert refused.value.path == "here line 2, column 7"
    assert parse_yaml(f"base: '{text}'\n", "here") == {"base": text}


def test_whole_numbers_are_bounded(parser: str) -> None:
    for text in ("1" * 20, "-" + "9" * 300, "0x" + "f" * 30):
        with pytest.raises(SpecError, match="more than 19 digits"):
            parse_yaml(f"a: {text}", "here")
    assert parse_yaml(f"a: {'9' * 5000}", "here") == {"a": "9" * 5000}  # too long for a number: no time is spent on it


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("width: 1\nvocab: 2\nwidth: 3\n", "line 3, column 1"),
        ("a: {heads: 1, heads: 2}\n", "line 1, column 15"),
        ("a:\n- b: 1\n  c: 2\n  b: 1\n", "line 4, column 3"),
        ("a: 1\n'a': 2\n", "line 2, column 1"),
        ("1: a\n1.0: b\n", "line 2, column 1"),
    ],
)
def test_a_key_given_twice_is_refused_where_it_is(text: str, place: str, parser: str) -> None:
    with pytest.raises(SpecError, match="is given twice") as refused:
        parse_yaml(text, "here")
    assert refused.value.path == f"here {place}"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: !!float 1", "tags"),
        ("a: !!binary aGk=", "tags"),
        ("a: !!set {b}", "tags"),
        ("a: !own 1", "tags"),
        ("a: ! 1", "tags"),
        ("[a, b]: 1", "a key is a list or a mapping"),
        ("? {a: b}\n: 1", "a key is a list or a mapping"),
        ("a: 1\n---\nb: 2\n", "a second document"),
        ("&x a: 1\n*x : 2\n", "aliases"),
        ("a: \udc80", "not valid Unicode|not YAML"),
        ("a: \x00", "not YAML"),
        ("a: b: c", "not YAML"),
        ("a: 'b", "not YAML"),
        ("%YAML 9.9\n---\na: 1", "not YAML"),
    ],
)
def test_other_yaml_features_are_refused(text: str, problem: str, parser: str) -> None:
    with pytest.raises(SpecError, match=problem):
        parse_yaml(text, "here")


@pytest.mark.slow
def test_the_number_of_items_is_bounded(parser: str) -> None:
    for text in ("".join(f"k{i}: 1\n" for i in range(SPEC_ITEMS)), "[" + "1," * SPEC_ITEMS + "1]"):
        with pytest.raises(SpecError, match="more than 50,000 items"):
            parse_yaml(text, "here")
    assert len(parse_yaml("[" + "1," * 1000 + "1]", "here")) == 1001


LAYERS = "width: 28\nvocab: 62\nlayers:\n"


def test_layers_are_bounded_before_they_are_written_out() -> None:
    begun = time.monotonic()
    for text, problem in (
        (LAYERS + "- {repeat: 10000, mixer: {heads: 2}}\n", f"10,000 layers .*the limit is {SPEC_LAYERS:,}"),
        (LAYERS + "- {repeat: 1000000000000, mixer: {heads: 2}}\n", "the limit is"),
        (LAYERS + "- {repeat: 10000, mixer: {heads: 2}}\n" * 2000, "the limit is"),
        (LAYERS + "- {repeat: 1000, mixer: {heads: 2}}\n" * 3, r"layers\.2\.repeat: 3,000 layers"),
        (LAYERS + "- {repeat: 100, mixer: {mask: [" + "causal, " * 20_000 + "causal]}}\n", f"the limit is {SPEC_FIELDS:,}"),
    ):
        with pytest.raises(SpecError, match=problem):
            from_yaml(text)
    assert time.monotonic() - begun < 20
    assert len(from_yaml(LAYERS + "- {repeat: 200, mixer: {heads: 2}}\n").layers) == 200


def test_masks_in_one_are_bounded() -> None:
    spec = from_yaml(LAYERS + "- {mixer: {heads: 2, mask: [" + "causal, " * 20_000 + "causal]}}\n")
    with pytest.raises(SpecError, match=r"layers\.0\.mixer\.mask\.masks: 20,001 masks"):
        check(spec)


@pytest.mark.parametrize(
    "text", ["yes", "1:30", "1e5", "010", "0o17", ".5", "1.", "~", "true", "1_000", "2024-01-01", ".nan", "=", ""]
)
def test_a_string_that_looks_like_something_else_stays_a_string(text: str, parser: str) -> None:
    assert parse_yaml(dump_yaml({"a": text, text or "b": [text]}), "here") == {"a": text, text or "b": [text]}


def test_numbers_survive_writing(parser: str) -> None:
    numbers = [0.1, 1e-06, 1e22, -2.5e-300, 1.0, 5e-324, math.pi, 0, -3, 2**53]
    assert parse_yaml(dump_yaml(numbers), "here") == numbers
