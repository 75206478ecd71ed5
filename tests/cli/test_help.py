"""The help of every verb: placeholders instead of Python types, no empty defaults, lines no longer than the terminal."""

from __future__ import annotations

import re

import pytest

from dovetail.cli import VERBS, main
from dovetail.cli.flags import dtype_name


def help_of(verb: str, columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit) as ended:
        main([verb, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("columns", [60, 80, 120])
def test_help_wraps_and_names_no_python_type(
    verb: str, columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = help_of(verb, columns, monkeypatch, capsys)
    assert not re.search(r"\bSTR\b|\bINT\b|\bFLOAT\b|\{None\}|default: None|default: False", text)
    prose = [line for line in text.splitlines() if not line.startswith("    ")]  # examples stay on one line
    assert max(map(len, prose)) <= columns


def test_dtypes_have_torch_names_and_short_ones() -> None:
    assert [dtype_name(name) for name in ("bf16", "bfloat16", "torch.float32", "FP16")] == [
        "bfloat16",
        "bfloat16",
        "float32",
        "float16",
    ]
    with pytest.raises(ValueError, match="is not a dtype"):
        dtype_name("int3")
