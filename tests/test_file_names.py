"""Test files have names of their own: pytest imports them by name, and refuses to collect the second of two equal ones."""

from __future__ import annotations

from collections import Counter
from pathlib import Path


def test_no_two_test_files_have_one_name() -> None:
    names = Counter(path.name for path in Path(__file__).parent.rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
