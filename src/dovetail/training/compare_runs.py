"""Compare two runs: what differs in spec and settings, and whether the comparison is fair.

data order        equal data, seed, batch and length: batch i has the same bits in both runs
tokens            trained on so far
initial weights   those with the same path and shape in both start from the same bits
budget            parameters, or FLOPs per token of training, equal within 1 %
tuning            equal optimizer, learning rate and schedule
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Iterator
from typing import Any

from dovetail.account import account, format_value
from dovetail.spec.fold import parameters
from dovetail.training.plan import Plan
from dovetail.training.record import RunRecord, shared
from dovetail.training.settings import FREE, RECORDED, differing
from dovetail.weights.surgery import diff
from dovetail.weights.surgery.groups import field_groups

ORDER = ("seed", "batch", "length")
DATA = ("sha256", "tokenizer")  # of what was recorded; images have no tokenizer
COMPARED_ELSEWHERE = ("run", "spec", RECORDED)
NOT_TUNED = {"seed", "evals", "quiet", "compile", "recompute", "micro_batches"}  # change the batches, or nothing but speed
TUNED = {"objective", *(field.name for field in dc.fields(Plan))} - NOT_TUNED
WITHIN = 0.01  # budgets that differ by less are equal


@dc.dataclass(frozen=True)
class RunComparison:
    """Run b against run a."""

    a: str
    b: str
    spec: tuple[tuple[str, str, str], ...]  # (path, value in a, value in b)
    settings: tuple[tuple[str, Any, Any], ...]
    order_differs: tuple[str, ...]  # settings for which the batches differ; empty: they are bit-equal
    tokens: tuple[int, int]
    shared_weights: int | None  # with the same path and shape; None: not recorded
    different_weights: tuple[str, ...]  # of these, those with other initial values
    parameters: tuple[int, int]
    flops: tuple[float, float]  # per token of a training step

    @property
    def unfair(self) -> tuple[str, ...]:
        """What makes the comparison unfair: the batches, the tokens, the tuning, the budget, the initial weights."""
        tuned = [path for path, _, _ in self.settings if path.split(".")[0] in TUNED]
        found = [f"batches ({', '.join(self.order_differs)})"] * bool(self.order_differs)
        found += ["tokens"] * (self.tokens[0] != self.tokens[1])
        found += [f"tuning ({', '.join(tuned)})"] * bool(tuned)
        found += [f"budget ({self._budget()})"] * (self.equal_in is None)
        return (*found, *(["initial weights"] * bool(self.different_weights)))

    @property
    def equal_in(self) -> str | None:
        """The measure of the budget in which both agree within 1 %; None where they do in none."""
        measures = {"parameters": self.parameters, "FLOPs per token": self.flops}
        return next((name for name, (a, b) in measures.items() if abs(a - b) <= WITHIN * max(a, b)), None)

    @property
    def fair(self) -> bool | None:
        """Whether nothing is unfair; None where the initial weights are not recorded."""
        return False if self.unfair else None if self.shared_weights is None else True

    def lines(self) -> Iterator[str]:
        """The comparison as lines of text."""
        for path, old, new in self.spec:
            yield f"  spec      {path}  {old} → {new}"
        for path, old, new in self.settings:
            yield f"  setting   {path}  {format_value(old)} → {format_value(new)}"
        if not self.spec and not self.settings:
            yield "  spec and settings are equal"
        order = "equal, bit for bit" if not self.order_differs else f"differ: {', '.join(self.order_differs)}"
        yield f"  batches   {order}"
        a, b = self.tokens
        yield f"  tokens    equal: {a:,}" if a == b else f"  tokens    differ: {a:,} and {b:,}"
        yield f"  budget    {self._budget()}"
        yield f"  initial weights that both have   {self._weights()}"
        yield f"  fair      {'no: other ' + ', '.join(self.unfair) if self.unfair else 'yes' if self.fair else 'not known'}"

    def _budget(self) -> str:
        (a, b), (c, d) = self.parameters, self.flops
        return f"{a:,} and {b:,} parameters, {c:,.0f} and {d:,.0f} FLOPs per token"

    def _weights(self) -> str:
        if self.shared_weights is None:
            return "not recorded (runs on several ranks do not record them)"
        if not self.different_weights:
            return f"equal, bit for bit: {self.shared_weights:,}"
        return f"differ: {len(self.different_weights):,} of {self.shared_weights:,}, the first {self.different_weights[0]}"

    def to_dict(self) -> dict[str, Any]:
        """The comparison as plain data."""
        verdict = {"batches_equal": not self.order_differs, "budget_equal_in": self.equal_in, "unfair": list(self.unfair)}
        return {**dc.asdict(self), **verdict, "fair": self.fair}


def compare_runs(a: RunRecord, b: RunRecord) -> RunComparison:
    """Compare two runs by what their directories record."""
    data = [record.settings.get(RECORDED, {}).get("data", {}) for record in (a, b)]
    order = [name for name in ORDER if a.settings.get(name) != b.settings.get(name)]
    order += [f"data ({name})" for name in DATA if data[0].get(name) != data[1].get(name)]
    order += [] if "sha256" in data[0] else ["data (not recorded)"]
    number, different = (None, []) if a.initial is None or b.initial is None else shared(a.initial, b.initial)
    return RunComparison(
        str(a.place),
        str(b.place),
        tuple((group.paths, group.a, group.b) for group in field_groups(diff(a.spec, b.spec))),
        tuple(differing(a.settings, b.settings, (*FREE, *COMPARED_ELSEWHERE))),
        tuple(order),
        (a.history[-1].tokens if a.history else 0, b.history[-1].tokens if b.history else 0),
        number,
        tuple(different),
        (parameters(a.spec), parameters(b.spec)),
        (_flops(a), _flops(b)),
    )


def _flops(record: RunRecord) -> float:
    """FLOPs per token of a training step: three times those of the forward pass."""
    flops = account(record.spec, record.settings.get("length")).flops_per_token
    return 3.0 * float(sum(value for name, value in flops.items() if name != "attention"))  # of the pairs that masks leave
