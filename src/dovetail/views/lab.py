"""A lab on a terminal and as a page: verdicts on top, the forest plot, curves with bands, sweeps, costs, what repeats it.

gqa    ├──●──┤      │            a line is an interval, the dot the mean difference; the grey band is what does not matter
mla          │  ├──●──┤
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from dovetail.base.installation import examined
from dovetail.base.units import flops, size
from dovetail.disk.yaml import dump_yaml
from dovetail.experiments.report import LabReport
from dovetail.experiments.results import sources_digest, versions
from dovetail.views.blocks import TextTable, View
from dovetail.views.chart import CANVAS, Chart, Points, band_chart
from dovetail.views.page import body
from dovetail.views.scaling import scaling_charts, scaling_tables, scaling_view

WIDTH, ROW = 600, 34  # units of the forest plot
MARGIN = 1.25  # the axis reaches beyond the largest mean and the widest bounded interval
COLUMNS = ("arm", "against", "verdict")
COSTS = (
    "arm",
    "parameters",
    "FLOP per token",
    "decode state",
    "learning rate",
    "ms per step",
    "seconds per run",
    "equal initial weights",
)
TRAINING = 3  # FLOPs of a training step, as times those of its forward pass


class ForestRow(NamedTuple):
    """An interval of the forest plot, on the canvas."""

    name: str
    kind: str
    y: int
    left: float
    middle: float
    right: float
    text: str


def lab_view(report: LabReport) -> list[View]:
    """Return what a terminal shows."""
    verdicts = [(name, report.arms[name].on or "", str(verdict)) for name, verdict in report.verdicts.items()]
    about = f"{report.metric}, arm − base; all intervals together hold with {report.level:.0%}, at any number of seeds"
    notes = [f"note: {note}" for note in report.notes]
    changes = [f"{name}: {line}" for name in report.verdicts for line in changes_of(report, name)]
    costs = TextTable(COSTS, list(cost_rows(report)), right=COSTS[1:])
    top: list[View] = [TextTable(COLUMNS, verdicts), "", about, ""] if report.verdicts else []
    top += [*item_lines(report), ""] if report.over_items else []
    laws = [view for one in report.scaling.values() for view in scaling_view(one)]
    return [*top, costs, "", *laws, *changes, *notes]


def item_lines(report: LabReport) -> list[str]:
    """The interval of each arm over the items of a task."""
    return [
        f"{name}: these models differ by {at.mean:+.4f} ({at.low:+.4f} to {at.high:+.4f}) over {at.n} items like these"
        for name, at in report.over_items.items()
    ]


def changes_of(report: LabReport, name: str) -> list[str]:
    """What an arm changes, a line per field."""
    arm = report.arms[name]
    solved = [f"{arm.solved} (solved for equal {report.match})"] if arm.solved else []
    solved += [] if arm.time_ratio is None else [f"a step takes {arm.time_ratio}"]
    return [f"{path} {old} → {new}" for path, old, new in arm.changes] + solved


def cost_rows(report: LabReport) -> Iterator[tuple[str, ...]]:
    """Yield the costs of each arm by COSTS."""
    for name, arm in report.arms.items():
        rate, seconds, step = (table.get(name) for table in (report.rates, report.seconds, report.step_seconds))
        share = report.equal_weights.get(name)
        counted = f"{arm.costs.parameters:,}", flops(arm.costs.flops_per_token), size(arm.costs.decode_state)
        times = "–" if step is None else f"{1000 * step:.1f}", "–" if seconds is None else f"{seconds:.1f}"
        yield name, *counted, "default" if rate is None else f"{rate:g}", *times, "–" if share is None else f"{share:.1%}"


def lab_page(report: LabReport) -> str:
    """Return the content of the page."""
    rows, zero, band, reach = forest(report)
    return body(
        "lab.html",
        report=report,
        rows=rows,
        zero=zero,
        band=band,
        ends=(f"{-reach:+.3g}", f"{reach:+.3g}"),
        design=dump_yaml(report.design),
        forest=(WIDTH, ROW * len(rows)),
        canvas=CANVAS,
        charts=[*_charts(report), *scaling_charts(report.scaling)],
        scaling=[(one, [(table.columns, table.rows) for table in scaling_tables(one)]) for one in report.scaling.values()],
        costs=list(cost_rows(report)),
        cost_columns=COSTS,
        changes={name: changes_of(report, name) for name in report.verdicts},
        runs=[
            (
                row.arm,
                str(row.seed),
                "default" if row.learning_rate is None else f"{row.learning_rate:g}",
                f"{row.value:.4f}",
                row.run.name,
            )
            for row in report.runs
        ],
        versions=versions(),
        item_lines=item_lines(report),
        machine=examined("")["processor"]["name"],
        sources=sources_digest(),
    )


def forest(report: LabReport) -> tuple[list[ForestRow], float, tuple[float, float], float]:
    """Return the rows of the forest plot, where 0 is, the ends of what does not matter, and the difference at the right end."""
    ends = [abs(end) for one in report.verdicts.values() for end in (one.interval.low, one.interval.high) if math.isfinite(end)]
    reach = MARGIN * max([*ends, *(abs(one.interval.mean) for one in report.verdicts.values()), report.smallest, 1e-9])

    def place(value: float) -> float:
        return round(WIDTH / 2 * (1 + max(-1.0, min(1.0, value / reach))), 1)

    rows = [
        ForestRow(
            name,
            one.kind,
            ROW * i + ROW // 2,
            place(one.interval.low),
            place(one.interval.mean),
            place(one.interval.high),
            str(one),
        )
        for i, (name, one) in enumerate(report.verdicts.items())
        if math.isfinite(one.interval.mean)
    ]
    return rows, place(0.0), (place(-report.smallest), place(report.smallest)), reach


def _charts(report: LabReport) -> Iterator[Chart]:
    """Yield the held-out loss by tokens, FLOPs and seconds, and the sweep of learning rates."""
    scales: Mapping[str, tuple[str, float]] = {
        "tokens": ("tokens", 0.0),
        "FLOPs": ("training FLOPs", float(TRAINING)),
        "seconds": ("seconds", 0.0),
    }
    judged = {name: [row.run.curve for row in report.runs if row.arm == name and not row.tuning] for name in report.arms}
    for by, (label, factor) in scales.items():
        curves: dict[str, list[Points]] = {}
        for name, runs in judged.items():
            per_token = factor * report.arms[name].costs.flops_per_token if factor else 1.0
            curves[name] = [
                [(seconds if by == "seconds" else tokens * per_token, loss) for tokens, seconds, loss in run] for run in runs
            ]
        if chart := band_chart(f"Held-out loss by {by}", label, "nats per token", curves):
            yield chart
    sweeps = {name: _columns(sweep) for name, sweep in report.sweeps.items() if sweep}
    if sweeps and (
        chart := band_chart("Tuning of the learning rate", "learning rate", report.metric, sweeps, logarithmic=True)
    ):
        yield chart


def _columns(sweep: Mapping[float, Sequence[float]]) -> list[Points]:
    """The metric by learning rate, a curve for each seed of the tuning."""
    rates = sorted(sweep)
    return [[(rate, sweep[rate][i]) for rate in rates] for i in range(min(len(sweep[rate]) for rate in rates))]
