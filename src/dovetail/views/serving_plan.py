"""The plan of serving on a terminal: replicas by their number of ranks, and what some users need of the best."""

from __future__ import annotations

from dovetail.base.units import count, size
from dovetail.planning.serving import Capacity, Load, Replica, assumptions
from dovetail.planning.serving_report import ServingReport
from dovetail.spec.fold import parameters
from dovetail.views.blocks import Cell, TextTable, View, styled

HEADS = ("GPUs", "rows", "weights", "state of a row", "first token", "next token", "requests/s", "tokens/s", "limit")


def serving_view(plan: ServingReport) -> View:
    """Return the table of replicas, what some users need, and the assumptions."""
    load, best = plan.load, plan.best
    stored = f"weights {load.weights}, cache {load.cache}"
    lines = [
        styled((plan.name, "bold"), f"   {count(parameters(plan.spec))} parameters on {plan.device.name}"),
        styled((f"requests of {load.prompt:,} + {load.answer:,} tokens; {stored}", "dim")),
        "",
        TextTable(HEADS, [_cells(one, load, one is best) for one in plan.replicas], right=HEADS[:-1])
        if plan.replicas
        else styled(("no replica fits; use more ranks, fewer bits, or more memory", "yellow")),
        *(styled((f"{one.tensor} GPUs: {one.reason}", "dim")) for one in plan.refused),
    ]
    if plan.capacity is not None:
        lines += ["", styled((_need(plan.capacity), "bold"))]
    return [*lines, "", *(styled(("assumed  ", "dim"), line) for line in assumptions(plan.device, load))]


def _cells(one: Replica, load: Load, best: bool) -> list[Cell]:
    """A row of the table, by HEADS."""
    sizes = f"{one.tensor}", f"{one.rows:,}", size(round(one.weights)), size(round(one.state))
    times = f"{1000 * one.prefill:,.0f} ms", f"{1000 * one.step:,.1f} ms"
    cells = *sizes, *times, f"{one.requests(load):,.2f}", f"{one.tokens(load):,.0f}", one.limit
    return [styled((cell, "bold cyan" if best else "")) for cell in cells]


def _need(need: Capacity) -> str:
    hour, million = need.dollars_per_hour, need.dollars_per_million_tokens
    rate = f"{need.requests:,.1f} requests/s at the peak"
    text = f"{count(need.users)} users: {rate}, {need.replicas:,} replicas, {need.gpus:,} GPUs"
    if hour is None or million is None:
        return text
    return f"{text}, ${hour:,.0f} per hour, ${million:,.2f} per million tokens at the peak"
