"""A ladder of sizes: the base made wider or narrower until it has each number of parameters, and what each size is trained on.

    sizes: [60k, 120k, 250k, 500k]        heads keep their size, and become more, as of `widened`
    budget: {tokens_per_parameter: 20}    or {tokens: 1M}, or {flops: 1e12}, 6 N D; a list: each size at each of them
    held_out: [1M]                        sizes that are trained, predicted by the fit, and not read by it

Every arm is built at every size and budget, and is compared there with what it stands on. One law is fitted to the runs of the
base, and one to those of each arm. Sizes at equal FLOPs are IsoFLOP curves (Hoffmann et al. 2022, approach 2).
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Iterator, Mapping

from dovetail.base.errors import SpecError
from dovetail.experiments.scaling import FLOPS_PER_PARAMETER
from dovetail.model.model import Model
from dovetail.spec.fold import parameters
from dovetail.weights.surgery.resize import widened

BUDGETS = ("tokens", "tokens_per_parameter", "flops")
SIZE_TOLERANCE = 0.1  # widths are whole multiples of one: few sizes are met exactly, and a fit reads the exact number
WIDEST = 256  # times the width of the base


@dc.dataclass(frozen=True)
class Ladder:
    """The sizes of a lab, with the budgets of each."""

    sizes: tuple[float, ...]  # parameters, rising; those that are held out are among them
    held_out: frozenset[float]
    by: str  # one of BUDGETS
    budgets: tuple[float, ...]

    def tokens(self, budget: float, size: int) -> int:
        """The tokens that a model of this size is trained on."""
        factors = {"tokens": 1.0, "tokens_per_parameter": size, "flops": 1 / (FLOPS_PER_PARAMETER * size)}
        return max(1, round(budget * factors[self.by]))


@dc.dataclass(frozen=True)
class Rung:
    """The base at one size, with one budget."""

    suffix: str  # of the names of its arms
    base: Model
    budget: Mapping[str, int]  # keys of a run file
    held_out: bool = False


def rungs(ladder: Ladder, base: Model) -> Iterator[Rung]:
    """Yield the base at each size and budget, the smallest first."""
    for size in ladder.sizes:
        spec = sized(base, size)
        count = parameters(spec)
        for budget in ladder.budgets:
            tokens = ladder.tokens(budget, count)
            yield Rung(f"-{short(size)}-{short(tokens)}", spec, {"tokens": tokens}, size in ladder.held_out)


def sized(base: Model, size: float) -> Model:
    """The base at the width at which its number of parameters is nearest to a size."""
    unit = next(width for width in range(1, base.width + 1) if _is_legal(base, width))
    low, high = 1, WIDEST * base.width // unit
    while high - low > 1:  # the number of parameters grows with the width
        middle = (low + high) // 2
        low, high = (middle, high) if parameters(widened(base, middle * unit)) <= size else (low, middle)
    near = min((widened(base, k * unit) for k in (low, high)), key=lambda spec: abs(parameters(spec) - size))
    if abs(parameters(near) - size) > SIZE_TOLERANCE * size:
        problem = f"no width brings the base to {short(size)} parameters; the nearest has {parameters(near):,}"
        raise SpecError("sizes", problem, "choose this size, or a base with smaller or fewer heads")
    return near


def _is_legal(base: Model, width: int) -> bool:
    try:
        widened(base, width)
    except SpecError:
        return False
    return True


def short(number: float) -> str:
    """A number as lab.yaml has it, for names: 60k, 1.25M."""
    for factor, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= factor:
            return f"{number / factor:.4g}{letter}"
    return f"{number:.0f}"
