"""No number of the structure rises without a reason: `python -m checks.house --write` stores new ones in the same commit."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from checks import house

STORED = json.loads(house.STORED.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def numbers() -> dict[str, int]:
    return house.measure()


@pytest.mark.parametrize("name", STORED)
def test_no_number_rises(name: str, numbers: dict[str, int]) -> None:
    assert numbers[name] <= STORED[name], "make it smaller, or store it and say why: python -m checks.house --write"


def test_every_number_is_stored(numbers: dict[str, int]) -> None:
    assert list(numbers) == list(STORED)


def test_later_capabilities_are_files_that_exist() -> None:
    """A pattern that nothing matches would be a capability that moved, and is counted again."""
    paths = [path.relative_to(house.SOURCE) for path in house.trees()]
    assert [pattern for pattern in house.LATER if not any(path.match(pattern) for path in paths)] == []
    assert house.is_later(Path("look/lens.py"))
    assert not house.is_later(Path("parts/mixer/attention.py"))


def test_circles_are_groups_that_reach_each_other() -> None:
    edges = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set[str](), "e": {"f"}, "f": {"e"}}
    assert sorted(map(sorted, house.circles(edges))) == [["a", "b", "c"], ["e", "f"]]
    assert house.circles({"a": {"b"}, "b": set()}) == []


def test_imports_of_functions_and_of_type_checkers_are_no_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    top = "import dovetail.b.c\nfrom dovetail.d import e\n"
    source = top + "if TYPE_CHECKING:\n    from dovetail.f import g\ndef h():\n    import dovetail.i\n"
    monkeypatch.setattr(house, "trees", lambda: {Path(house.SOURCE / "a" / "x.py"): ast.parse(source)})
    assert house.room_imports() == {"a": {"b", "d"}}


def test_html_is_a_tag_and_rich_is_found_in_functions() -> None:
    assert house._writes_html(ast.parse("def f(x): return f'<p class=a>{x}</p>'"))
    assert not house._writes_html(ast.parse("a = ['<s>', '<tr_TR>', 'x<p']"))
    assert house._imports(ast.parse("def f():\n    from rich.text import Text"), "rich")
    assert not house._imports(ast.parse("import richer"), "rich")
