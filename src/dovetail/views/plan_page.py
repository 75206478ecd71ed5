"""The page of a plan: the best layout as figures and a picture, the traced layouts, those that cannot run, assumptions.

    pipeline   ▣ ▢ ▢ ▢ … ▢        a row per axis with several ranks; the first square is what the next row shows from inside
                └──────┐
    shards     ▣ ▢ ▢ ▢ … ▢
                └──────┐
    tensor     ▣ ▢ ▢ ▢ ▢ ▢ ▢ ▢

The picture is an SVG of 340 units of width (templates/plan.html), which a phone shows in full size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from dovetail.base.units import size
from dovetail.parallel.layout import Layout
from dovetail.planning.report import PlanReport
from dovetail.planning.search import Planned
from dovetail.views.page import Fact, body
from dovetail.views.plan import COLUMNS, NUMBERS, layout_rows, plan_facts

SQUARES = 17  # that a row of the picture has room for
AXES = {  # from the outermost: what the ranks of an axis have
    "pipeline": "other layers",
    "replicas": "other rows, the same weights",
    "shards": "other rows, a slice of the weights",
    "sequence": "another chunk of every row",
    "tensor": "other heads and hidden units",
}


class Axis(NamedTuple):
    """An axis of a layout with several ranks."""

    name: str
    ranks: int
    note: str

    @property
    def drawn(self) -> int:
        """The squares in its row; the number of ranks follows if there is no room for all."""
        return self.ranks if self.ranks <= SQUARES else SQUARES - 2


def plan_page(plan: PlanReport) -> str:
    """Return the content of the page."""
    best = plan.best
    return body(
        "plan.html",
        plan=plan,
        axes=[] if best is None else axes_of(best.layout) or [Axis("rank", 1, "everything")],
        label=lambda layout: f"{layout.ranks:,} ranks: {layout}",
        memory=() if best is None else list(_memory(best, plan.job.device.usable)),
        figures=() if best is None else list(_figures(plan)),
        columns=COLUMNS,
        numbers=NUMBERS,
        layouts=layout_rows(plan),
        refused=_refused(plan),
    )


def axes_of(layout: Layout) -> list[Axis]:
    """Return the axes with several ranks, from the outermost."""
    return [Axis(name, ranks, note) for name, note in AXES.items() if (ranks := getattr(layout, name)) > 1]


def _figures(plan: PlanReport) -> Iterator[Fact]:
    """Yield the figures of the best layout; those without a name are parts of the one above them."""
    facts: list[Fact] = []
    for name, value, note in plan_facts(plan):
        facts.append(Fact(name, value, note) if name else facts.pop().with_part(value, note))
    yield from facts


def _memory(one: Planned, usable: float) -> Iterator[tuple[str, str, str, str]]:
    """Yield (name, width, amount, class of the color) of what a rank holds; the whole width is the usable memory, or the peak
    if that is more."""
    memory, whole = one.memory, max(usable, one.memory.peak)
    names = {"optimizer": "optimizer state", "activations": "activations and temporary tensors"}
    for kind in ("weights", "gradients", "optimizer", "activations"):
        part = getattr(memory, kind)
        yield names.get(kind, kind), f"{100 * part / whole:.2f}%", size(part), kind


def _refused(plan: PlanReport) -> Iterator[tuple[Layout, int, str]]:
    """Yield (example, how many more, reason) of the layouts that cannot run, the most frequent reason first."""
    for reason, number in Counter(one.reason for one in plan.refused).most_common():
        yield next(one.layout for one in plan.refused if one.reason == reason), number - 1, reason
