"""check: the errors of a spec before any tensor exists, each with its path; and advice, which is never an error."""

from __future__ import annotations

from dovetail.base.errors import SpecError
from dovetail.spec.field import faults
from dovetail.spec.fold import declared
from dovetail.spec.part import Part, Problem, field_types, join, walk, walk_spec
from dovetail.spec.weight import State


def problems(spec: Part) -> list[tuple[str, Problem]]:
    """(path of the field, problem) for the whole tree. Bounds are checked first, then parts, parents before children. The
    first part with errors ends the check, since its children's sizes follow from it."""
    out_of_bounds = [
        (join(path, field), Problem("", fault, remedy))
        for path, part in walk_spec(spec)
        for field, fault, remedy in faults(part, field_types(type(part)))
    ]
    if out_of_bounds:
        return out_of_bounds
    try:
        for path, part, scope in walk(spec):
            if errors := part.check(scope):
                return [(join(path, error.field) if error.field else path, error) for error in errors]
        return tied(spec) or misread(spec)
    except (KeyError, ZeroDivisionError) as broken:
        raise SpecError("", f"no part defines the size of the axis {broken}", "a part above must add it") from broken


def tied(spec: Part) -> list[tuple[str, Problem]]:
    """Weights tied to another weight (`same_as`) that is missing or has another shape."""
    weights = list(declared(spec))
    shapes = {d.path: d.weight.shape(d.scope) for d in weights if d.weight.stored}
    errors: list[tuple[str, Problem]] = []
    for d in weights:
        same, shape = d.weight.same_as, d.weight.shape(d.scope)
        if same is not None and shapes.get(same) != shape:
            other = f"has shape {shapes[same]}, not {shape}" if same in shapes else "is missing"
            errors.append((d.path, Problem("", f"is tied to {same}, which {other}", "untie it, or give both one shape")))
    return errors


def misread(spec: Part) -> list[tuple[str, Problem]]:
    """Reads of values that are not there when they are read, or have another shape; and of caches that are too short."""
    errors: list[tuple[str, Problem]] = []
    there: dict[str, tuple[dict[str, tuple[int, ...]], list[State]]] = {}  # path -> published shapes, decode state
    for path, part, scope in walk(spec):
        for read in part.reads(scope):
            shapes, _ = there.get(read.source, ({}, []))
            shape, known = shapes.get(read.name), ", ".join(shapes) or "nothing"
            own = tuple(scope.size(axis) for axis in read.axes)
            if read.source not in there or read.source.startswith(f"{scope.stack}.{scope.layer}."):
                errors.append((path, Problem("", f"reads {read.name} of {read.source}, which does not run before it")))
            elif shape is None:
                what = f"reads {read.name} of {read.source or 'the model'}, which publishes {known}"
                errors.append((path, Problem("", what)))
            elif shape != own:
                what = f"reads {read.name} of {read.source or 'the model'} as {own}; it is {shape}"
                errors.append((path, Problem("", what, "give both the same sizes")))
        states = part.state(scope)
        for state in states:
            stored = there[state.same_as][1] if state.same_as in there else []
            if any(_shorter(one, state) for one in stored):
                what = f"reads the cache of {state.same_as}, whose window is shorter"
                errors.append((join(path, "mask"), Problem("", what, "give both the same mask")))
        shapes = {name: tuple(scope.size(axis) for axis in axes) for name, axes in part.publishes().items()}
        there[path] = (shapes, states)
    return errors


def _shorter(stored: State, read: State) -> bool:
    if stored.window is None:
        return False
    return read.window is None or read.window > stored.window or read.keep > stored.keep


def check(spec: Part) -> None:
    """Raise SpecError with the first error and the number of others."""
    errors = problems(spec)
    if errors:
        path, error = errors[0]
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        raise SpecError(path, error.problem + more, error.remedy)


def advice(spec: Part, length: int | None = None) -> list[tuple[str, Problem]]:
    """(path, advice) for sequences of `length` tokens; equal advice about several layers is listed once."""
    advice_at: dict[tuple[str, str], tuple[str, Problem]] = {}
    for path, part, scope in walk(spec):
        for problem in part.advise(scope, length):
            place = join(path, problem.field) if problem.field else path
            advice_at.setdefault((problem.field, problem.problem), (place, problem))
    return list(advice_at.values())
