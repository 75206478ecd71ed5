"""The page of a plan: the best layout as figures and a picture, the traced layouts, those that cannot run, assumptions.

    pipeline   ▣ ▢ ▢ ▢ … ▢        a row per axis with several ranks; the first square is what the next row shows from inside
                └──────┐
    shards     ▣ ▢ ▢ ▢ … ▢
                └──────┐
    tensor     ▣ ▢ ▢ ▢ ▢ ▢ ▢ ▢

The picture is an SVG of 340 units of width, which a phone shows in full size; its colors are those of the page.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from dovetail.core.units import size
from dovetail.parallel.layout import Layout
from dovetail.planning.report import Findings
from dovetail.planning.search import Planned
from dovetail.views.page import Fact, facts, text
from dovetail.views.plan import plan_facts

WIDTH, SQUARE, GAP, ROW = 340, 16, 3, 62
SQUARES = 17  # that a row has room for
AXES = {  # from the outermost: what the ranks of an axis have
    "pipeline": "other layers",
    "replicas": "other rows, the same weights",
    "shards": "other rows, a slice of the weights",
    "sequence": "another chunk of every row",
    "tensor": "other heads and hidden units",
}
RULES = """
.dovetail .ranks{display:block;width:100%;max-width:36rem;height:auto}
.dovetail .ranks text{font:11px system-ui,sans-serif;fill:var(--ink)}
.dovetail .ranks .note{fill:var(--soft)}
.dovetail .ranks rect{fill:var(--card);stroke:var(--line)}
.dovetail .ranks rect.own{fill:var(--accent);stroke:var(--accent)}
.dovetail .ranks path{fill:none;stroke:var(--line)}
.dovetail .memory{display:flex;height:1.5rem;border:1px solid var(--line);border-radius:4px;overflow:hidden;max-width:36rem}
.dovetail .memory span{display:block;border-right:1px solid var(--page);background:var(--accent)}
.dovetail .memory span:nth-child(2){opacity:.8}
.dovetail .memory span:nth-child(3){opacity:.6}
.dovetail .memory span:nth-child(4){opacity:.4}
.dovetail .plan td{overflow-wrap:normal}
"""


class Axis(NamedTuple):
    """An axis of a layout with several ranks."""

    name: str
    ranks: int
    note: str


def plan_page(plan: Findings) -> str:
    """Return the content of the page."""
    job, parts = plan.job, [f"<h1>{text(plan.name)} on {plan.job.gpus:,} × {text(plan.job.device.name)}</h1>"]
    parts.append(f'<p class="soft">{job.batch:,} rows of {job.length:,} tokens per step</p>')
    parts.append(f"<p>{text(plan.reason)}</p>")
    if plan.best is not None:
        parts.append(f"<h2>{text(str(plan.best.layout))}</h2>{picture(plan.best.layout)}")
        parts.append(f"<h2>Memory per rank</h2>{_memory(plan.best, plan.job.device.usable)}")
        parts.append(facts(Fact(name or note, value, note if name else "") for name, value, note in plan_facts(plan)))
    if plan.layouts:
        parts.append(f"<h2>Layouts that were traced</h2>{_layouts(plan)}")
    if plan.refused:
        parts.append(f"<h2>Layouts that cannot run</h2>{_refused(plan)}")
    items = "".join(f"<li>{text(line)}</li>" for line in plan.assumptions)
    return "".join([*parts, f"<h2>Assumptions</h2><ul>{items}</ul>"])


def axes_of(layout: Layout) -> list[Axis]:
    """Return the axes with several ranks, from the outermost."""
    return [Axis(name, ranks, note) for name, note in AXES.items() if (ranks := getattr(layout, name)) > 1]


def picture(layout: Layout) -> str:
    """Return the layout as an SVG."""
    axes = axes_of(layout) or [Axis("rank", 1, "everything")]
    height = ROW * len(axes) - 14
    rows = "".join(_row(axis, i * ROW, i < len(axes) - 1) for i, axis in enumerate(axes))
    label = f"{layout.ranks:,} ranks: {layout}"
    return (
        f'<svg class="ranks" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{text(label)}">'
        f"<title>{text(label)}</title>{rows}</svg>"
    )


def _row(axis: Axis, top: int, more: bool) -> str:
    """One axis: its name, a square per rank as far as there is room, and a line from the first square to the row below."""
    drawn = axis.ranks if axis.ranks <= SQUARES else SQUARES - 2
    step, below = SQUARE + GAP, top + 18
    squares = [
        f'<rect{" class=own" if i == 0 else ""} x="{1 + i * step}" y="{below}" width="{SQUARE}" height="{SQUARE}" rx="3"/>'
        for i in range(drawn)
    ]
    if drawn < axis.ranks:
        squares.append(f'<text class="note" x="{1 + drawn * step}" y="{below + 12}">… {axis.ranks:,}</text>')
    line = f'<path d="M9 {below + SQUARE}V{below + SQUARE + 9}H{WIDTH - 1}V{top + ROW + 12}"/>' if more else ""
    name = f'<text x="1" y="{top + 11}">{axis.name} {axis.ranks:,} <tspan class="note">{axis.note}</tspan></text>'
    return f"<g>{name}{''.join(squares)}{line}</g>"


def _memory(one: Planned, usable: float) -> str:
    """Return the memory of a rank as a bar, whose whole width is the usable memory, or the peak where that is more."""
    memory, whole = one.memory, max(usable, one.memory.peak)
    named = {
        "weights": memory.weights,
        "gradients": memory.gradients,
        "optimizer state": memory.optimizer,
        "activations and temporary tensors": memory.activations,
    }
    bars = "".join(
        f'<span style="width:{100 * part / whole:.2f}%" title="{text(f"{name}: {size(part)}")}"></span>'
        for name, part in named.items()
    )
    words = " · ".join(f"{name} {size(part)}" for name, part in named.items())
    return f'<div class="memory">{bars}</div><p class="soft">{text(words)}</p>'


def _layouts(plan: Findings) -> str:
    rows: list[str] = []
    for one, found in zip(plan.layouts, plan.outlooks, strict=True):
        days = "–" if found.days is None else f"{found.days:,.1f}"
        cells = (size(one.memory.peak), f"{one.seconds.total:.3g} s", f"{found.mfu:.1%}", days)
        numbers = "".join(f'<td class="n">{text(cell)}</td>' for cell in cells)
        micro = f"{one.setting.micro_batches} × {one.setting.rows}"
        rows.append(
            f"<tr><td>{text(str(one.layout))}</td><td>{'yes' if one.fits else 'no'}</td>{numbers}"
            f"<td>{text(micro)}</td><td>{text(one.setting.recompute)}</td><td>{text(one.limit)}</td></tr>"
        )
    heads = "".join(f'<th class="n">{name}</th>' for name in ("memory", "step", "MFU", "days"))
    return (
        f'<div class="wide"><table class="plan"><tr><th>layout</th><th>fits</th>{heads}<th>micro-batches</th>'
        f"<th>recompute</th><th>limited by</th></tr>{''.join(rows)}</table></div>"
    )


def _refused(plan: Findings) -> str:
    reasons = Counter(one.reason for one in plan.refused)
    items: list[str] = []
    for reason, number in reasons.most_common():
        example = str(next(one.layout for one in plan.refused if one.reason == reason))
        items.append(f"<li>{text(example)}{f' and {number - 1} more' if number > 1 else ''}: {text(reason)}</li>")
    return f"<details><summary>{len(plan.refused):,} layouts</summary><ul>{''.join(items)}</ul></details>"
