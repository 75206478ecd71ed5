"""check: every error of a spec before any tensor is made, each with its path; and advice, which never stops anyone."""

from __future__ import annotations

from dovetail.core.errors import SpecError
from dovetail.core.fold import declared
from dovetail.core.part import Part, Problem, join, walk


def problems(spec: Part) -> list[tuple[str, Problem]]:
    """(path of the field, what is wrong) for the whole tree. A broken parent is reported before its children are asked."""
    found: list[tuple[str, Problem]] = []
    try:
        for path, part, scope in walk(spec):
            found += [(join(path, p.field) if p.field else path, p) for p in part.check(scope)]
            if found:
                return found
        return found + shared(spec)
    except (KeyError, ZeroDivisionError) as broken:
        raise SpecError(
            "", f"the spec has no size for the axis {broken}", "a part asks for an axis nobody above it defines"
        ) from broken


def shared(spec: Part) -> list[tuple[str, Problem]]:
    """Weights declared the same as another that is not there, or is of another shape."""
    everything = list(declared(spec))
    shapes = {d.path: d.weight.shape(d.scope) for d in everything if d.weight.learned}
    found: list[tuple[str, Problem]] = []
    for d in everything:
        same = d.weight.same_as
        if same is not None and shapes.get(same) != d.weight.shape(d.scope):
            what = f"of shape {shapes[same]}" if same in shapes else "missing"
            found.append(
                (d.path, Problem("", f"is to be the same as {same}, which is {what}", "untie it, or give both one shape"))
            )
    return found


def check(spec: Part) -> None:
    """Raise the first error, with a word on how many more there are."""
    found = problems(spec)
    if found:
        path, problem = found[0]
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise SpecError(path, problem.problem + more, problem.remedy)


def advice(spec: Part, length: int | None = None) -> list[tuple[str, Problem]]:
    """Rules of thumb this spec goes against, for sequences of `length`; equal advice for many layers is given once."""
    said: dict[tuple[str, str], tuple[str, Problem]] = {}
    for path, part, scope in walk(spec):
        for problem in part.advise(scope, length):
            said.setdefault((problem.field, problem.problem), (join(path, problem.field) if problem.field else path, problem))
    return list(said.values())
