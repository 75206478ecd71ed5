"""A plan on a terminal: the best layout with its memory, traffic and time, the others, those that cannot run, assumptions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from dovetail.base.units import count, flops, size
from dovetail.planning.report import HOUR, Outlook, PlanReport, bubble_of
from dovetail.planning.search import Planned, PlannedJob
from dovetail.spec.fold import parameters
from dovetail.views.console import plain_table

SHOWN = 6  # reasons of refusal
COLUMNS = ("layout", "fits", "memory", "step", "MFU", "days", "micro-batches", "recompute", "limited by")
NUMBERS = COLUMNS[2:7]


def plan_view(plan: PlanReport, width: int) -> Iterator[RenderableType]:
    """Yield what a terminal of so many columns shows."""
    job = plan.job
    run = "" if plan.tokens is None else f", {count(plan.tokens)} tokens"
    yield Text.assemble((plan.name, "bold"), f"   {count(parameters(job.spec))} parameters on {job.gpus:,} × {job.device.name}")
    yield Text(f"{job.batch:,} rows of {job.length:,} tokens per step{run}", "dim")
    yield ""
    if plan.best is not None:
        yield Text.assemble(("best  ", "dim"), (str(plan.best.layout), "bold cyan"))
        yield Text(plan.reason, "dim")
        yield ""
        yield facts_table(plan_facts(plan))
    else:
        yield Text(plan.reason, "yellow")
    if plan.layouts:
        yield ""
        yield layout_table(plan)
    if plan.refused or plan.not_traced:
        yield ""
        yield from _refusals(plan)
    yield ""
    yield from (Text.assemble(("assumed  ", "dim"), line) for line in plan.assumptions)


def plan_facts(plan: PlanReport) -> list[tuple[str, str, str]]:
    """Return the figures of the best layout: name, value, note."""
    one, found = plan.layouts[0], plan.outlooks[0]
    memory, seconds, sure = one.memory, one.seconds, found.reliability
    usable = size(int(plan.job.device.usable))
    lines = [
        ("memory per rank", size(memory.peak), f"at its peak, of {usable} usable"),
        ("", size(memory.weights), "weights"),
        ("", size(memory.gradients), "gradients"),
        ("", size(memory.optimizer), "optimizer state"),
        ("", size(memory.activations), f"activations, gathered weights, temporary tensors; recompute {one.setting.recompute}"),
        ("bytes per step", size(round(one.links.within)), "sent by one rank within its node"),
        ("", size(round(one.links.between)), "sent by one rank to other nodes"),
    ]
    for (kind, group), traffic in one.trace.cost.traffic.items():
        if traffic.bytes > 0.001 * one.trace.cost.communicated:
            lines.append(("", size(traffic.bytes), f"{kind} over {group.ranks:,} ranks, {traffic.calls:,} calls"))
    waiting = f", {bubble_of(one):.0%} pipeline bubble" if one.layout.pipeline > 1 else ""
    pieces = f"{one.setting.micro_batches} micro-batches of {one.setting.rows} rows{waiting}"
    lines += [
        ("step", f"{seconds.total:.3g} s", pieces),
        ("", f"{seconds.compute:.3g} s", f"compute: {flops(one.trace.cost.flops)} per rank"),
        ("", f"{seconds.exposed:.3g} s", f"communication; {seconds.hidden:.3g} s more run during compute"),
        ("throughput", f"{found.tokens_per_second:,.0f}", f"tokens/s, {found.mfu:.1%} of the peak FLOP/s (MFU)"),
    ]
    lines += _run_facts(plan, found)
    lines += [
        (
            "checkpoint",
            size(sure.checkpoint_bytes),
            f"in {sure.checkpoint_seconds:.1f} s, every {sure.interval / 60:.1f} minutes",
        ),
        ("goodput", f"{sure.goodput:.1%}", f"one interruption per {sure.between_interruptions / HOUR:,.1f} hours"),
    ]
    return lines


def _run_facts(plan: PlanReport, found: Outlook) -> list[tuple[str, str, str]]:
    if plan.tokens is None or found.days is None or found.interruptions is None:
        return []
    lines = [("run", f"{found.days:,.1f} days", f"for {count(plan.tokens)} tokens, interruptions included")]
    if found.dollars is not None:
        lines.append(("", f"${found.dollars:,.0f}", "at the price per GPU-hour"))
    return [*lines, ("interruptions", f"{found.interruptions:,.0f}", "expected in the run")]


def facts_table(lines: Sequence[tuple[str, str, str]]) -> Table:
    """Return the figures as a table."""
    table = plain_table("name", "value", "note", right=("value",))
    for name, value, note in lines:
        table.add_row(Text(name, "dim"), Text(value, "cyan"), Text(note, "dim"))
    return table


def layout_table(plan: PlanReport) -> Table:
    """Return the traced layouts as a table."""
    table = plain_table(*COLUMNS, right=NUMBERS, header=True)
    for layout, fits, *cells in layout_rows(plan):
        table.add_row(layout, Text(fits, "green" if fits == "yes" else "yellow"), *cells)
    return table


def layout_rows(plan: PlanReport) -> Iterator[tuple[str, ...]]:
    """Yield the traced layouts by COLUMNS."""
    for one, found in zip(plan.layouts, plan.outlooks, strict=True):
        yield _layout_cells(plan.job, one, found)


def layout_line(job: PlannedJob, one: Planned, found: Outlook) -> Text:
    """One layout in a line, which is printed when it is traced."""
    layout, _, *cells = _layout_cells(job, one, found)
    mark = ("✓ ", "green") if one.fits else ("✗ ", "yellow")
    pairs = zip(COLUMNS[2:], cells, strict=True)
    return Text.assemble(mark, (layout, "bold"), ": " + ", ".join(f"{name} {cell}" for name, cell in pairs if cell != "–"))


def _layout_cells(job: PlannedJob, one: Planned, found: Outlook) -> tuple[str, ...]:
    """A row of the table of layouts, by COLUMNS."""
    days = "–" if found.days is None else f"{found.days:,.1f}"
    numbers = size(one.memory.peak), f"{one.seconds.total:.3g} s", f"{found.mfu:.1%}", days
    limit = one.limit if one.fits else f"memory: {size(int(job.device.usable))} are usable"
    setting = f"{one.setting.micro_batches} × {one.setting.rows}", one.setting.recompute, limit
    return str(one.layout), "yes" if one.fits else "no", *numbers, *setting


def _refusals(plan: PlanReport) -> Iterator[RenderableType]:
    """Yield the reasons for which layouts cannot run, each with the number of layouts and one of them."""
    reasons = Counter(one.reason for one in plan.refused)
    for reason, number in reasons.most_common(SHOWN):
        example = next(one.layout for one in plan.refused if one.reason == reason)
        more = f" and {number - 1} more" if number > 1 else ""
        yield Text.assemble(("refused  ", "yellow"), f"{example}{more}: ", (reason, "dim"))
    if len(reasons) > SHOWN:
        left = sum(reasons.values()) - sum(number for _, number in reasons.most_common(SHOWN))
        yield Text(f"refused  {left} more layouts, for {len(reasons) - SHOWN} other reasons (--json lists all)", "dim")
    if plan.not_traced:
        yield Text(f"{plan.not_traced} more layouts may fit; they are slower by estimate and were not traced (--top)", "dim")
