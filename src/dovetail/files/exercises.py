"""The exercises of the book: questions with a number as the answer. The proofs beside them are for tests; they do not run.

Chapters are counted in the order of the book's index: 7.2 is the second exercise of the seventh chapter, and so is NAME.2.
"""

from __future__ import annotations

import dataclasses as dc
import re
from pathlib import Path

from dovetail.base.errors import FileError, UsageError, names_or_nearest
from dovetail.disk.yaml import parse_yaml

PACKAGE = Path(__file__).parents[1]
TOCTREE = re.compile(r"```\{toctree\}(.*?)```", re.DOTALL)
PAGE = re.compile(r"^(?:[^<>\n]*<)?(\w+)>?$", re.MULTILINE)  # `Masks <masks>` or `masks`


@dc.dataclass(frozen=True)
class Exercise:
    """A question, its answer, and how far off is right."""

    number: str
    chapter: str
    question: str
    answer: float
    within: float

    def right(self, answer: float) -> bool:
        """Whether an answer is near enough."""
        return abs(answer - self.answer) <= self.within + 1e-9 * abs(self.answer)


def exercises() -> list[Exercise]:
    """Return the exercises in the order of the book: of the installed package, or of the checkout that it is run from."""
    folder = PACKAGE / "book"
    folder = folder if folder.is_dir() else PACKAGE.parents[1] / "docs/book"
    path = folder / "exercises.yaml"
    by_chapter = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    chapters = PAGE.findall("\n".join(TOCTREE.findall((folder / "index.md").read_text(encoding="utf-8"))))
    return [
        Exercise(f"{place}.{i}", chapter, one["ask"], float(one["answer"]), float(one["within"]))
        for place, chapter in enumerate(chapters, 1)
        for i, one in enumerate(by_chapter[chapter], 1)
    ]


def find_exercise(name: str) -> Exercise:
    """Return the exercise of this number, 7.2, or of this chapter and number, masks.2."""
    known = exercises()
    chapter, _, number = name.partition(".")
    of_chapter = [one for one in known if chapter in (one.chapter, one.number.partition(".")[0])]
    if not of_chapter:
        if chapter.isdigit():
            raise FileError(f"{name}: the book has no chapter {chapter}; its last exercise is {known[-1].number}")
        nearest = names_or_nearest(chapter, list(dict.fromkeys(one.chapter for one in known)), "chapters")
        raise FileError(f"{name}: the book has no chapter {chapter!r}; {nearest}")
    found = [one for one in of_chapter if one.number.partition(".")[2] == number]
    if not found:
        raise UsageError(f"{name}: chapter {chapter} has the exercises {of_chapter[0].number} to {of_chapter[-1].number}")
    return found[0]
