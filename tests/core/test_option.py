"""Options of public functions: bounds, types that only checkers import, and errors as a call or a command line writes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import pytest

from dovetail.core.errors import FileError, UsageError
from dovetail.core.option import Option, Unresolved, alternatives, checks_options, declared, in_python, names_options, values_of

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


def test_an_error_names_options_as_a_call_does_and_leaves_commands() -> None:
    with pytest.raises(FileError) as refused:
        names_options(run)("m", note="fail")
    assert str(refused.value) == "out: exists; give from_, from_ or force=True, not --other; dovetail run --force"
    assert in_python("llama-force --no-force", run) == "llama-force force=False"
