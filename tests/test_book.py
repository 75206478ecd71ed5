"""The book: a chapter has its sections, asserts a number of its text, draws what it computes, and its exercises are right."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import dovetail as dt

BOOK = Path(__file__).parents[1] / "docs/book"
INDEX = (BOOK / "index.md").read_text(encoding="utf-8")
CHAPTERS = re.findall(
    r"^(?:[^<>\n]*<)?(\w+)>?$", "\n".join(re.findall(r"```\{toctree\}(.*?)```", INDEX, re.DOTALL)), re.MULTILINE
)
EXERCISES: dict[str, list[dict[str, Any]]] = yaml.safe_load((BOOK / "exercises.yaml").read_text(encoding="utf-8"))
SECTIONS = ["The equation", "In code", "The picture", "Choose it", "Break it", "Exercises", "Papers"]
EXTRAS = runpy.run_path(str(BOOK.parent / "book_extras.py"))
DRAW = runpy.run_path(str(BOOK / "draw.py"))
LINES = 20  # of the first snippet
WORDS = 900  # two pages of print


def text(chapter: str) -> str:
    return (BOOK / f"{chapter}.md").read_text(encoding="utf-8")


def section(chapter: str, name: str) -> str:
    return text(chapter).split(f"\n## {name}\n")[1].split("\n## ")[0]


def test_every_page_is_a_chapter_of_the_index() -> None:
    assert sorted(CHAPTERS) == sorted(path.stem for path in BOOK.glob("*.md") if path.stem != "index")
    assert sorted(EXERCISES) == sorted(CHAPTERS)
    assert sorted(path.stem for path in (BOOK / "pictures").glob("*.py")) == sorted(CHAPTERS)


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_chapter_has_its_sections_in_order_and_two_pages_at_most(chapter: str) -> None:
    page = text(chapter)
    assert re.findall(r"^## (.*)$", page, re.MULTILINE) == SECTIONS
    question = page.partition("\n## ")[0].split("\n", 1)[1].strip()
    assert question.endswith("?"), "a chapter begins with the question that it answers"
    assert len(re.sub(r"```.*?```", "", page, flags=re.DOTALL).split()) <= WORDS
    assert "$$" in section(chapter, "The equation")
    assert re.search(r"```(yaml|bash|console|python)\n", section(chapter, "Choose it"))
    assert "failed" in section(chapter, "Break it"), "the law is shown failing"


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_the_code_asserts_a_number_of_the_text(chapter: str) -> None:
    before, code = re.search(r"(.*?)```python\n(.*?)```", section(chapter, "In code"), re.DOTALL).groups()  # pyright: ignore
    assert len([line for line in code.splitlines() if line.strip()]) <= LINES
    asserted = set(re.findall(r"\d+(?:[.,]\d+)*", "\n".join(line for line in code.splitlines() if "assert" in line)))
    told = set(re.findall(r"\d+(?:[.,]\d+)*", before + section(chapter, "The equation")))
    plain = {number.replace(",", "") for number in told}
    assert any(number.replace("_", "") in plain for number in asserted), f"none of {asserted} is in the text"


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_the_picture_is_reproduced_from_its_script(chapter: str) -> None:
    stored = json.loads((BOOK / f"pictures/{chapter}.json").read_text(encoding="utf-8"))
    assert close(stored, DRAW["computed"](chapter)), f"python docs/book/draw.py {chapter}"
    assert f"](pictures/{chapter}.svg)" in section(chapter, "The picture")
    assert (BOOK / f"pictures/{chapter}.svg").stat().st_size > 2000


def close(a: Any, b: Any) -> bool:
    """Equal data, numbers within 1 in 1,000: another processor rounds otherwise."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(close(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(close, a, b))
    return abs(a - b) <= 1e-3 * max(abs(a), abs(b)) + 1e-9 if isinstance(a, float) else a == b


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_the_exercises_are_those_of_the_page_and_their_answers_right(chapter: str) -> None:
    asked = re.findall(r"^\d+\. (.*)$", section(chapter, "Exercises"), re.MULTILINE)
    assert [one["ask"] for one in EXERCISES[chapter]] == asked
    assert len(asked) >= 2
    for one in EXERCISES[chapter]:
        torch.manual_seed(0)
        assert float(eval(one["proof"], {"dt": dt, "torch": torch})) == pytest.approx(one["answer"], abs=one["within"])


def test_the_map_has_every_chapter_and_joins_those_that_name_each_other() -> None:
    picture, links = EXTRAS["map_svg"](), EXTRAS["links"]()
    assert re.findall(r'<a href="(\w+)\.html"', picture) == CHAPTERS
    assert picture.count('class="link"') == len(links) > 10
    order = {name: i for i, name in enumerate(CHAPTERS)}
    assert all(order[earlier] < order[later] for earlier, later in links)


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_notebook_is_its_chapter(chapter: str) -> None:
    page, cells = text(chapter), EXTRAS["notebook"](text(chapter))["cells"]
    runs = re.compile(r"(?<!-->\n)^```(python|bash)\n(.*?)^```$", re.DOTALL | re.MULTILINE)  # not those after "no run"
    code = [cell["source"] for cell in cells if cell["cell_type"] == "code"]
    assert code == [("%%bash\n" if kind == "bash" else "") + body.rstrip("\n") for kind, body in runs.findall(page)]
    words = "\n".join(cell["source"] for cell in cells if cell["cell_type"] == "markdown").split()
    assert words == runs.sub("", page).split()


@pytest.mark.slow
@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_notebook_runs(chapter: str, tmp_path: Path) -> None:
    nbformat, nbclient = (pytest.importorskip(name, reason="needs the extra notebooks") for name in ("nbformat", "nbclient"))
    notebook = nbformat.from_dict(EXTRAS["notebook"](text(chapter)))
    nbformat.validate(notebook)
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
