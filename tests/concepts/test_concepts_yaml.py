"""Every idea of tests/concepts.yaml is whole: its chapter, command, law and tests exist, and docs/concepts.md has it."""

from __future__ import annotations

import ast
import functools
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import dovetail as dt
from dovetail.cli import main
from dovetail.proof.laws.case import LAWS
from dovetail.proof.laws.oracle import grouped_kinds
from dovetail.proof.laws.suite import OWN_NUMBER

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from verbs import RUNS  # noqa: E402  the verbs of the command line

BOOK = (ROOT / "docs/book/index.md").read_text(encoding="utf-8")
CHAPTERS = set(re.findall(r"^[^<>\n]*<(\w+)>$", BOOK, re.MULTILINE))
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
            if values == "RECIPES":
                return {path.stem for path in (ROOT / "recipes").glob("*.py")} - {"run"}
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
        assert idea.keys() == {"section", "idea", "chapter", "spec", "law", "tests"}, idea
        assert all(idea.values()), idea
    assert [idea["section"] for idea in IDEAS] == sorted(idea["section"] for idea in IDEAS)
    assert {idea["section"] for idea in IDEAS} == set(range(1, 13))
    assert len({idea["idea"] for idea in IDEAS}) == len(IDEAS)


def test_every_idea_has_a_chapter_and_every_chapter_an_idea() -> None:
    assert {idea["chapter"] for idea in IDEAS} == CHAPTERS - {"known_slips"}  # which is about all of them


def test_every_idea_has_a_law_or_the_reason_why_not() -> None:
    for idea in IDEAS:
        none, _, reason = idea["law"].partition(": ")
        assert idea["law"] in {*LAWS, OWN_NUMBER} or (none == "none" and len(reason) > 20), idea


@pytest.mark.parametrize("line", sorted({idea["spec"] for idea in IDEAS}))
def test_the_line_that_chooses_an_idea_is_a_command(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A spec is shown; of another command the verb and the flags exist."""
    program, verb, *rest = shlex.split(line)
    assert program == "dovetail"
    if verb == "show":
        changes = {"--set": list[str](), "--swap": list[str](), "--length": list[str]()}
        for flag, value in zip(rest[1::2], rest[2::2], strict=True):
            changes[flag].append(value)
        dt.show(rest[0], set=changes["--set"], swap=changes["--swap"])
        return
    words = [verb, rest[0]] if f"{verb} {rest[0]}" in RUNS else [verb]
    assert " ".join(words) in RUNS, f"{verb} is no command"
    with pytest.raises(SystemExit) as ended:
        main([*words, "--help"])
    assert ended.value.code == 0
    known = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out))
    assert {word for word in rest if word.startswith("--")} <= known


def test_the_page_of_ideas_has_each_with_its_chapter() -> None:
    page = (ROOT / "docs/concepts.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+?) \| .{4,} \| \[[^]]+\]\(book/(\w+)\.md\) \|$", page, re.MULTILINE)
    assert rows == [(idea["idea"], idea["chapter"]) for idea in IDEAS]


def test_every_test_of_this_folder_belongs_to_an_idea() -> None:
    named = {re.sub(r"\[.*", "", name) for name in NAMES}
    for file in sorted((ROOT / "tests" / "concepts").glob("test_*_ideas.py")):
        path = f"tests/concepts/{file.name}"
        here = {f"{path}::{name}" for name in functions(path) if name.startswith("test_")}
        assert here <= named, here - named
