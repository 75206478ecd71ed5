"""Check an answer to an exercise of the book; without an answer, print the question.

dovetail learn check 2.1
dovetail learn check 2.1 0.5
dovetail learn check masks.1 500500
"""

from __future__ import annotations

import dataclasses as dc
from typing import Annotated, Any

from dovetail.api.result import Result
from dovetail.base.option import Option
from dovetail.files.exercises import Exercise, find_exercise
from dovetail.views.blocks import View


@dc.dataclass(frozen=True, repr=False)
class CheckedExercise(Result):
    """An exercise, and an answer to it if one was given."""

    exercise: Exercise
    answer: float | None

    @property
    def right(self) -> bool | None:
        """Whether the answer is right; None without one."""
        return None if self.answer is None else self.exercise.right(self.answer)

    @property
    def failed(self) -> bool:
        return self.right is False

    def to_dict(self) -> dict[str, Any]:
        exercise = self.exercise
        question = {"number": exercise.number, "chapter": exercise.chapter, "question": exercise.question}
        return {**question, "answer": self.answer, "right": self.right}

    def view(self, width: int) -> View:
        verdict = f"dovetail learn check {self.exercise.number} ANSWER checks an answer"
        if self.answer is not None:
            verdict = f"{self.answer:.10g} is {'right' if self.right else 'not right'}"
        return [f"{self.exercise.chapter} {self.exercise.number}: {self.exercise.question}", verdict]


def check_exercise(
    exercise: Annotated[
        str, Option("The number of an exercise, 7.2, or its chapter and number, masks.2.", form="NUMBER", argument=True)
    ],
    answer: Annotated[
        float | None, Option("Your answer (default: none; the question is printed).", form="ANSWER", argument=True)
    ] = None,
) -> CheckedExercise:
    """Check an answer to an exercise of the book. Without an answer the result has the question."""
    return CheckedExercise(find_exercise(exercise), answer)
