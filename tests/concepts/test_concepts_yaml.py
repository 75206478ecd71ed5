"""Every test that tests/concepts.yaml names exists; a bracketed case is one that pytest collects."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from dovetail.proof.laws.oracle import grouped_kinds

ROOT = Path(__file__).parents[2]
IDEAS: list[dict[str, Any]] = yaml.safe_load((ROOT / "tests" / "concepts.yaml").read_text())
NAMES = sorted({name for idea in IDEAS for name in idea["tests"]})


@functools.cache
def functions(file: str) -> dict[str, ast.FunctionDef]:
    tree = ast.parse((ROOT / file).read_text())
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def cases(file: str, function: ast.FunctionDef) -> set[str] | None:
    """The ids of a test that is parametrized by a module's dict or by every kind; None where that cannot be read off."""
    for mark in function.decorator_list:
        if isinstance(mark, ast.Call) and isinstance(mark.func, ast.Attribute) and mark.func.attr == "parametrize":
            values = ast.unparse(mark.args[1])
            if values == "grouped_kinds()":
                return set(grouped_kinds())
            for node in ast.parse((ROOT / file).read_text()).body:
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == values and isinstance(node.value, ast.Dict):
                    return {ast.literal_eval(key) for key in node.value.keys if key is not None}
    return None


@pytest.mark.parametrize("name", NAMES)
def test_a_named_test_exists(name: str) -> None:
    match = re.fullmatch(r"(tests/[\w/]+\.py)::(test_\w+)(?:\[(.+)\])?", name)
    assert match, f"{name!r} is no name of a test"
    file, test, case = match.groups()
    assert (ROOT / file).is_file(), f"{file} is missing"
    assert test in functions(file), f"{file} holds no {test}"
    if case is not None:
        known = cases(file, functions(file)[test])
        assert known is not None, f"cannot tell the cases of {test}"
        assert case in known, f"{test} has no case {case!r}"


def test_every_idea_is_whole_and_named_once() -> None:
    for idea in IDEAS:
        assert idea.keys() == {"section", "idea", "tests"}, idea
        assert idea["tests"], idea
        assert idea["section"] in range(1, 13), idea
    assert len({(idea["section"], idea["idea"]) for idea in IDEAS}) == len(IDEAS)


def test_every_test_of_this_folder_belongs_to_an_idea() -> None:
    named = {re.sub(r"\[.*", "", name) for name in NAMES}
    for file in sorted((ROOT / "tests" / "concepts").glob("test_*_ideas.py")):
        path = f"tests/concepts/{file.name}"
        here = {f"{path}::{name}" for name in functions(path) if name.startswith("test_")}
        assert here <= named, here - named
