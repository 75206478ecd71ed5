"""match: the field value that makes two specs equal in budget."""

from __future__ import annotations

import dataclasses as dc
from typing import TYPE_CHECKING, Annotated, Any, Literal

from dovetail.api.arguments import Changes, SpecLike, read_spec
from dovetail.api.options import SPEC, Length, Sets, Spec, Swaps
from dovetail.api.result import Result
from dovetail.base.errors import SpecError
from dovetail.base.option import Option
from dovetail.views.blocks import TextTable, View

if TYPE_CHECKING:
    from dovetail.model.model import Model
    from dovetail.weights.surgery.budget import Found

SHOWN = 5  # fields in the table
Budget = Literal["params", "flops", "kv"]
UNITS: dict[Budget, str] = {"params": "parameters", "flops": "FLOPs per token", "kv": "bytes of decode state"}


@dc.dataclass(frozen=True, repr=False)
class Match(Result):
    """The changes that make B cost what A costs, the best first."""

    a: str
    b: str
    by: Budget
    length: int
    target: float  # the cost of A
    before: float  # the cost of B as it is
    found: tuple[Found, ...]

    @property
    def best(self) -> Found | None:
        """The change to make; None where no field reaches A's cost within 1 %, and where none is needed."""
        from dovetail.weights.surgery.budget import TOLERANCE

        return self.found[0] if self.found and self.found[0].distance(self.target) <= TOLERANCE else None

    @property
    def equal(self) -> bool:
        """Whether B, after the best change, costs what A costs within 1 %."""
        from dovetail.weights.surgery.budget import TOLERANCE

        return self.best is not None or abs(self.before - self.target) <= TOLERANCE * self.target

    @property
    def spec(self) -> Model | None:
        """B after the best change."""
        return None if self.best is None else self.best.spec

    @property
    def failed(self) -> bool:
        return not self.equal

    def to_dict(self) -> dict[str, Any]:
        rows = [
            {"field": one.path, "old": one.old, "value": one.value, "cost": one.cost, "distance": one.distance(self.target)}
            for one in self.found
        ]
        sides = {"a": self.a, "b": self.b, "by": self.by, "length": self.length, "cost_a": self.target, "cost_b": self.before}
        return {**sides, "equal": self.equal, "set": self._set(), "rows": rows}

    def _set(self) -> str | None:
        return None if self.best is None else f"{self.best.path}={self.best.value}"

    def view(self, width: int) -> View:
        unit = UNITS[self.by]
        rows = [
            (one.path, f"{one.old:,}", f"{one.value:,}", f"{one.cost:,.0f}", f"{one.cost / self.target:.4f}")
            for one in self.found[:SHOWN]
        ]
        columns = ("field of B", "now", "value", unit, "÷ A")
        head = f"A, {self.a}: {self.target:,.0f} {unit}; B, {self.b}: {self.before:,.0f}, {self.before / self.target:.4f} of A"
        return [head, *([TextTable(columns, rows, right=columns[1:])] if rows else []), self._verdict()]

    def _verdict(self) -> str:
        from dovetail.weights.surgery.budget import TOLERANCE

        if self.best is not None:
            return f"equal within {TOLERANCE:.0%}: --set '{self._set()}'"
        if self.equal:
            return f"equal within {TOLERANCE:.0%} as they are"
        if not self.found:
            return "no field of B's layers changes this cost; change its kind of mixer, or the number of layers"
        near = self.found[0]
        steps = (
            f"the nearest is {near.path}={near.value}, {near.distance(self.target):.1%} away: its legal values are too coarse"
        )
        return f"not equal within {TOLERANCE:.0%}: {steps}; change two fields, or the number of layers"


def match(
    a: Annotated[SpecLike, SPEC],
    b: Annotated[SpecLike, Spec("The one whose field is changed.", argument=True)],
    *,
    by: Budget = "params",
    vary: Annotated[
        str | None,
        Option("The field of B to change, for all layers: layers.*.ffn.hidden (default: the one that changes least)."),
    ] = None,
    length: Annotated[int | None, Length("Tokens of the text (default: 2048, or the longest that both support).")] = None,
    set: Annotated[Changes, Sets("Change a field of B first: --set layers.*.mixer.kv_heads=1; may be given many times.")] = (),
    swap: Annotated[
        Changes,
        Swaps("Change a part of B in every layer first: --swap position=alibi; may be given many times, applied before --set."),
    ] = (),
) -> Match:
    """Find the field value of B, after `set` and `swap`, at which it has as many parameters as A (`by="params"`), as many FLOPs
    per token ("flops") or as many bytes of decode state ("kv"), within 1 %. `vary` names the field to change
    (layers.*.ffn.hidden); by default the one that changes least is taken. `length`: of the text (default: 2048, or the longest
    that both take)."""
    from dovetail.account import usual_length
    from dovetail.spec.check import check
    from dovetail.weights.surgery.budget import BUDGETS, TOLERANCE, match_budget

    one, other = read_spec(a), read_spec(b).after(set, swap)
    check(one.spec)
    check(other.spec)
    tokens = length or min(usual_length(one.spec), usual_length(other.spec))
    target, before = (BUDGETS[by](spec, tokens) for spec in (one.spec, other.spec))
    if target <= 0:
        raise SpecError("layers", f"A has no {UNITS[by]}", "compare by another budget")
    near = abs(before - target) <= TOLERANCE * target and vary is None
    found = [] if near else match_budget(one.spec, other.spec, by, tokens, vary)
    return Match(one.name, other.name, by, tokens, target, before, tuple(found))
