"""mup_check: the coordinate check of µP, as a table and a plot."""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from dovetail.api.arguments import Changes, SpecLike, read_spec, silent
from dovetail.api.options import Length, Seed, Steps
from dovetail.api.result import Result
from dovetail.base.errors import UsageError
from dovetail.base.keywords import checks_keywords
from dovetail.base.option import BatchSize, Option
from dovetail.disk.atomic import check_free
from dovetail.training.plan import OptimizerKind, Plan
from dovetail.views.blocks import TextTable, View
from dovetail.views.curve import draw_coordinates

if TYPE_CHECKING:
    from dovetail.training.coordinates import Coordinate

SEEDS = 3


@checks_keywords
@dc.dataclass(frozen=True, repr=False)
class CoordinateCheck(Result):
    """How much the first steps change each activation, over widths."""

    name: str
    widths: tuple[int, ...]
    coordinates: tuple[Coordinate, ...]
    steps: int
    learning_rate: float

    @property
    def largest_slope(self) -> float:
        """The largest slope of log₂ change over log₂ width."""
        return max(coordinate.slope for coordinate in self.coordinates)

    @property
    def flat(self) -> bool:
        """Whether no activation changes more in wider models, within FLAT."""
        from dovetail.training.coordinates import FLAT

        return self.largest_slope <= FLAT

    @property
    def failed(self) -> bool:
        return not self.flat

    def to_dict(self) -> dict[str, Any]:
        rows = [{"address": c.address, "changes": list(c.changes), "slope": c.slope} for c in self.coordinates]
        return {
            "name": self.name,
            "widths": list(self.widths),
            "steps": self.steps,
            "learning_rate": self.learning_rate,
            "rows": rows,
            "largest_slope": self.largest_slope,
            "flat": self.flat,
        }

    def view(self, width: int) -> View:
        from dovetail.training.coordinates import FLAT

        title = f"{self.name}: change of activations in {self.steps} steps at a learning rate of {self.learning_rate:g}"
        columns = ("activation", *(f"width {one:,}" for one in self.widths), "slope")
        rows = [(c.address, *(f"{change:.3g}" for change in c.changes), f"{c.slope:+.2f}") for c in self.coordinates]
        verdict = "flat" if self.flat else "not flat"
        remedy = "" if self.flat else "; µP is init: mup, and for a tied head head.scale: base_width/width"
        summary = f"the largest slope is {self.largest_slope:+.2f}: {verdict} (at most {FLAT:+.2f}){remedy}"
        return [title, TextTable(columns, rows, right=columns[1:]), summary]

    def draw(self, path: str | Path, force: bool = False) -> None:
        """Plot the changes over widths to a file; an existing one is replaced if `force`."""
        check_free(path, force)
        draw_coordinates(self.widths, [(c.address, c.changes) for c in self.coordinates], path, self.name)


def mup_check(
    spec: SpecLike,
    text: str | Path,
    *,
    widths: Sequence[int] = (),
    steps: Annotated[int, Steps("Steps per width.")] = 4,
    learning_rate: Annotated[float, Option("The learning rate at every width.", low=0.0, above=True)] = 1e-2,
    optimizer: OptimizerKind = Plan.optimizer,
    batch: Annotated[int, BatchSize("Sequences per step.")] = 8,
    length: Annotated[int, Length("Tokens per sequence.")] = 32,
    seed: Annotated[int, Seed("The seed of initial weights and batches.")] = 0,
    set: Changes = (),
    swap: Changes = (),
    progress: Callable[[int, int], None] = silent,
) -> CoordinateCheck:
    """Train a spec at several widths (1, 2, 4 and 8 times its own by default) for a few steps on a text, and compare by how
    much each activation changes. Under µP (`init: mup`) the change does not grow with the width, and the best learning rate
    stays about where it is."""
    from dovetail.training.coordinates import FACTORS, coordinate_check
    from dovetail.training.source import BatchShape, from_text
    from dovetail.training.task import objective_kind
    from dovetail.weights.surgery.resize import widened

    name, changed, _ = read_spec(spec).after(set, swap)
    kind = objective_kind(changed, "text")
    tried = tuple(widths) or tuple(factor * changed.width for factor in FACTORS)
    if len({*tried}) < 2:
        raise UsageError("--widths: give at least two different widths")
    specs = [widened(changed, width) for width in tried]
    source = from_text(Path(text), changed, "byte_pair", BatchShape(batch, length, seed), silent, kind.special(length))
    objective = kind.of(changed, source.tokenizer, length)
    plan = Plan(steps=steps, learning_rate=learning_rate, optimizer=optimizer, seed=seed, quiet=True)
    found = coordinate_check(specs, source.batch, objective, plan, SEEDS, progress)
    return CoordinateCheck(name, tried, tuple(found), steps, learning_rate)
