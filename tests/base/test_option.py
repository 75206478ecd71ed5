"""Options of public functions: bounds, types that only checkers import, and errors as a call or a command line writes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import pytest

from dovetail.base.errors import FileError, UsageError
from dovetail.base.option import Option, checks_options, declared, in_python, names_options
from dovetail.base.value import Unresolved, alternatives, fits, in_words, type_problem, values_of

if TYPE_CHECKING:
    from elsewhere import Model  # type: ignore[import-not-found]


def run(
    model: Annotated[str | Model, Option("The model.", argument=True)],
    *,
    batch: Annotated[int | None, Option("Rows.", low=1, high=2000)] = None,
    share: Annotated[float, Option("A share.", low=0.0, high=1.0, above=True)] = 0.5,
    kind: Annotated[Literal["a", "b"] | None, Option("A kind.")] = None,
    from_: Annotated[str, Option("The start.", short="-f")] = "",
    force: Annotated[bool, Option("Replace.")] = False,
    note: object = None,
) -> str:
    """Return what was given."""
    if note == "fail":
        raise FileError("out: exists; give --from, -f or --force, not --other; dovetail run --force")
    return f"{model} {batch} {share}"


def test_a_type_that_only_checkers_import_is_left_out() -> None:
    options = declared(run)
    assert [*options] == ["model", "batch", "share", "kind", "from_", "force"]
    assert alternatives(options["model"].hint) == (str,)
    assert values_of(options["kind"].hint) == ("a", "b")
    assert Unresolved.dtype is Unresolved
    assert (options["model"].required, options["from_"].key) == (True, "from")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"batch": 0}, "batch: 0 is not from 1 to 2,000"),
        ({"batch": 2001}, "batch: 2,001 is not from 1 to 2,000"),
        ({"share": 0.0}, "share: 0 is not above 0, up to 1"),
        ({"share": float("nan")}, "share: nan is not above 0, up to 1"),
    ],
)
def test_a_number_out_of_bounds_is_refused(options: dict[str, float], problem: str) -> None:
    with pytest.raises(UsageError) as refused:
        checks_options(run)("m", **options)  # type: ignore[arg-type]
    assert str(refused.value) == problem


def test_what_is_within_bounds_passes() -> None:
    assert checks_options(run)("m", batch=2000, share=1.0) == "m 2000 1.0"
    assert Option("Any number.").problem(float("nan")) is None
    assert Option("Rows.", low=1, high=2).problem("3") is None


def test_an_error_names_options_and_commands_as_calls() -> None:
    with pytest.raises(FileError) as refused:
        names_options(run)("m", note="fail")
    assert str(refused.value) == "out: exists; give from_, from_ or force=True, not --other; dt.run(force=True)"
    assert in_python("llama-force --no-force", run) == "llama-force force=False"
    command = "first: dovetail merge a-b -o DIR, or `dovetail port`"
    assert in_python(command, run) == "first: dt.merge('a-b', out=DIR), or `dovetail port`"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"batch": "3"}, "batch: '3' is not a whole number"),
        ({"batch": True}, "batch: True is not a whole number"),
        ({"share": "half"}, "share: 'half' is not a number"),
        ({"kind": "c"}, "kind: 'c' is none of its values; values: a, b"),
        ({"kind": 3}, "kind: 3 is not a or b"),
        ({"force": "no"}, "force: 'no' is not true or false"),
        ({"from_": None}, "from_: None is not a string"),
        ({"model": 3}, "model: 3 is not a string"),
    ],
)
def test_a_value_of_another_type_is_refused(options: dict[str, object], problem: str) -> None:
    with pytest.raises(UsageError) as refused:
        checks_options(run)(**{"model": "m"} | options)  # type: ignore[arg-type]
    assert str(refused.value) == problem


def test_objects_pass_where_a_type_is_for_checkers_only() -> None:
    assert checks_options(run)(Path("m"), batch=None, share=1, kind="b", note=run) == "m None 1"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("hint", "good", "bad", "words"),
    [
        (Sequence[str], ["a"], [3], "a list"),
        (Sequence[int], range(3), "12", "a list"),
        (str | Path | None, Path("a"), b"a", "a path or a string"),
        (tuple[float, float], [0.9, 1], (0.9,), "a list of 2 numbers"),
        (Mapping[str, Any], {}, [], "a mapping"),
        (Callable[[str], None], print, "print", "a function"),
        (Literal["a", 2] | Sequence[str], ["a"], 3, "a or 2 or a list"),
        (int, np.int64(3), 3.0, "a whole number"),
        (float, np.float32(3), 3j, "a number"),
        (Option, Option(""), "o", "of the type Option"),
        (str | Unresolved, print, 3, "a string"),
    ],
)
def test_types_of_values(hint: Any, good: object, bad: object, words: str) -> None:
    assert fits(good, hint)
    assert not fits(bad, hint)
    assert in_words(hint) == words


def test_a_single_value_in_place_of_a_list_is_named() -> None:
    assert type_problem("cache", Sequence[str]) == "'cache' is not a list; give ['cache']"
