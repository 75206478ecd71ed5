"""A plan on a terminal and as a page: the best layout with its memory, traffic and time, the others, those that cannot run,
assumptions; of a plan of serving, the replicas by their number of ranks, and what some users need of the best.

    pipeline   ▣ ▢ ▢ ▢ … ▢        a row per axis with several ranks; the first square is what the next row shows from inside
                └──────┐
    shards     ▣ ▢ ▢ ▢ … ▢
                └──────┐
    tensor     ▣ ▢ ▢ ▢ ▢ ▢ ▢ ▢

The picture is an SVG of 340 units of width (templates/plan.html), which a phone shows in full size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from dovetail.base.units import count, flops, size
from dovetail.parallel.layout import Layout
from dovetail.planning.report import HOUR, Outlook, PlanReport, bubble_of
from dovetail.planning.search import Planned, PlannedJob
from dovetail.planning.serving import Capacity, Load, Replica, ServingReport, assumptions
from dovetail.spec.fold import parameters
from dovetail.views.blocks import Cell, TextTable, View, styled
from dovetail.views.console import plain_table
from dovetail.views.page import Fact, body

SHOWN = 6  # reasons of refusal
COLUMNS = ("layout", "fits", "memory", "step", "MFU", "days", "micro-batches", "recompute", "limited by")
NUMBERS = COLUMNS[2:7]
HEADS = (
    "GPUs",
    "rows",
    "weights",
    "state of a row",
    "first token",
    "next token",
    "requests/s",
    "tokens/s",
    "limit",
)  # of a plan of serving
SQUARES = 17  # that a row of the picture has room for
AXES = {  # from the outermost: what the ranks of an axis have
    "pipeline": "other layers",
    "replicas": "other rows, the same weights",
    "shards": "other rows, a slice of the weights",
    "sequence": "another chunk of every row",
    "tensor": "other heads and hidden units",
}


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


def _run_facts(plan: PlanReport, outlook: Outlook) -> list[tuple[str, str, str]]:
    if plan.tokens is None or outlook.days is None or outlook.interruptions is None:
        return []
    lines = [("run", f"{outlook.days:,.1f} days", f"for {count(plan.tokens)} tokens, interruptions included")]
    if outlook.dollars is not None:
        lines.append(("", f"${outlook.dollars:,.0f}", "at the price per GPU-hour"))
    return [*lines, ("interruptions", f"{outlook.interruptions:,.0f}", "expected in the run")]


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


def layout_line(job: PlannedJob, planned: Planned, found: Outlook) -> Text:
    """One layout in a line, which is printed when it is traced."""
    layout, _, *cells = _layout_cells(job, planned, found)
    mark = ("✓ ", "green") if planned.fits else ("✗ ", "yellow")
    pairs = zip(COLUMNS[2:], cells, strict=True)
    return Text.assemble(mark, (layout, "bold"), ": " + ", ".join(f"{name} {cell}" for name, cell in pairs if cell != "–"))


def _layout_cells(job: PlannedJob, planned: Planned, outlook: Outlook) -> tuple[str, ...]:
    """A row of the table of layouts, by COLUMNS."""
    days = "–" if outlook.days is None else f"{outlook.days:,.1f}"
    numbers = size(planned.memory.peak), f"{planned.seconds.total:.3g} s", f"{outlook.mfu:.1%}", days
    limit = planned.limit if planned.fits else f"memory: {size(int(job.device.usable))} are usable"
    setting = f"{planned.setting.micro_batches} × {planned.setting.rows}", planned.setting.recompute, limit
    return str(planned.layout), "yes" if planned.fits else "no", *numbers, *setting


def _refusals(plan: PlanReport) -> Iterator[RenderableType]:
    """Yield the reasons for which layouts cannot run, each with the number of layouts and one of them."""
    refused = list(_refused(plan))
    for example, others, reason in refused[:SHOWN]:
        more = f" and {others} more" if others else ""
        yield Text.assemble(("refused  ", "yellow"), f"{example}{more}: ", (reason, "dim"))
    if rest := refused[SHOWN:]:
        number = sum(1 + others for _, others, _ in rest)
        yield Text(f"refused  {number} more layouts, for {len(rest)} other reasons (--json lists all)", "dim")
    if plan.not_traced:
        yield Text(f"{plan.not_traced} more layouts may fit; they are slower by estimate and were not traced (--top)", "dim")


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


def _memory(planned: Planned, usable: float) -> Iterator[tuple[str, str, str, str]]:
    """Yield (name, width, amount, class of the color) of what a rank holds; the whole width is the usable memory, or the peak
    if that is more."""
    memory, whole = planned.memory, max(usable, planned.memory.peak)
    names = {"optimizer": "optimizer state", "activations": "activations and temporary tensors"}
    for kind in ("weights", "gradients", "optimizer", "activations"):
        part = getattr(memory, kind)
        yield names.get(kind, kind), f"{100 * part / whole:.2f}%", size(part), kind


def _refused(plan: PlanReport) -> Iterator[tuple[Layout, int, str]]:
    """Yield (example, how many more, reason) of the layouts that cannot run, the most frequent reason first."""
    for reason, number in Counter(one.reason for one in plan.refused).most_common():
        yield next(one.layout for one in plan.refused if one.reason == reason), number - 1, reason


def serving_view(plan: ServingReport) -> View:
    """Return the table of replicas, what some users need, and the assumptions."""
    load, best = plan.load, plan.best
    stored = f"weights {load.weights}, cache {load.cache}"
    lines = [
        styled((plan.name, "bold"), f"   {count(parameters(plan.spec))} parameters on {plan.device.name}"),
        styled((f"requests of {load.prompt:,} + {load.answer:,} tokens; {stored}", "dim")),
        "",
        TextTable(HEADS, [_cells(replica, load, replica is best) for replica in plan.replicas], right=HEADS[:-1])
        if plan.replicas
        else styled(("no replica fits; use more ranks, fewer bits, or more memory", "yellow")),
        *(styled((f"{one.tensor} GPUs: {one.reason}", "dim")) for one in plan.refused),
    ]
    if plan.capacity is not None:
        lines += ["", styled((_need(plan.capacity), "bold"))]
    return [*lines, "", *(styled(("assumed  ", "dim"), line) for line in assumptions(plan.device, load))]


def _cells(replica: Replica, load: Load, best: bool) -> list[Cell]:
    """A row of the table, by HEADS."""
    sizes = f"{replica.tensor}", f"{replica.rows:,}", size(round(replica.weights)), size(round(replica.state))
    times = f"{1000 * replica.prefill:,.0f} ms", f"{1000 * replica.step:,.1f} ms"
    cells = *sizes, *times, f"{replica.requests(load):,.2f}", f"{replica.tokens(load):,.0f}", replica.limit
    return [styled((cell, "bold cyan" if best else "")) for cell in cells]


def _need(need: Capacity) -> str:
    hour, million = need.dollars_per_hour, need.dollars_per_million_tokens
    rate = f"{need.requests:,.1f} requests/s at the peak"
    text = f"{count(need.users)} users: {rate}, {need.replicas:,} replicas, {need.gpus:,} GPUs"
    if hour is None or million is None:
        return text
    return f"{text}, ${hour:,.0f} per hour, ${million:,.2f} per million tokens at the peak"
