"""List the exercises of the book, with the number by which `dovetail learn check` knows them.

dovetail learn
dovetail learn check 2.1
dovetail learn check 2.1 0.5
"""

from __future__ import annotations

import dataclasses as dc
from typing import Any

from dovetail.api.result import ListResult
from dovetail.files.exercises import Exercise, exercises
from dovetail.views.blocks import TextTable, View, styled


@dc.dataclass(frozen=True, repr=False)
class ExerciseList(ListResult[Exercise]):
    """The exercises in the order of the book."""

    exercises: tuple[Exercise, ...]

    def to_dict(self) -> dict[str, Any]:
        rows = [{"number": one.number, "chapter": one.chapter, "question": one.question} for one in self.exercises]
        return {"exercises": rows}

    def view(self, width: int) -> View:
        rows = [(styled((exercise.number, "bold")), exercise.chapter, exercise.question) for exercise in self.exercises]
        below = styled(("dovetail learn check NUMBER ANSWER checks an answer", "dim"))
        return [TextTable(("number", "chapter", "question"), rows, header=False), "", below]


def list_exercises() -> ExerciseList:
    """Return the exercises of the book, each a question with a number as its answer."""
    return ExerciseList(tuple(exercises()))
