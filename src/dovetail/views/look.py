"""The traits of a model, and what a training run did: spikes, and what its checkpoints show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dovetail.views.blocks import TextTable, View, styled
from dovetail.views.runs import run_curves

if TYPE_CHECKING:
    from dovetail.look.findings import Finding
    from dovetail.training.dynamics import CheckpointState, Spike
    from dovetail.training.record import RunRecord

TRAITS = ("trait", "address", "score", "threshold", "null", "false-alarm rate", "evidence", "tested by")
SPIKES = ("step", "spike of", "value", "median before", "tokens")
CHECKPOINTS = ("step", "update ratio per step", "row entropy", "busiest expert", "induction", "head")


def trait_lines(findings: Sequence[Finding]) -> list[View]:
    """Four lines for each finding."""
    lines = list[View]()
    for finding in findings:
        score, threshold, null, rate = _numbers(finding)
        known = "" if null == "–" else f", null distribution up to {null}"
        rates = "all others have it as well" if rate == "–" else f"false-alarm rate {rate}"
        lines.append(styled((finding.name, "bold"), f"  {finding.address}"))
        lines.append(f"    score {score} (threshold {threshold}){known}, {rates}\n    {finding.evidence}")
        lines.append(styled((f"    {finding.test}", "cyan")))
    return lines


def trait_table(findings: Sequence[Finding]) -> TextTable:
    """A row for each finding."""
    return TextTable(TRAITS, [(f.name, f.address, *_numbers(f), f.evidence, f.test) for f in findings], right=TRAITS[2:6])


def _numbers(finding: Finding) -> tuple[str, str, str, str]:
    rate = "–" if math.isnan(finding.false_alarm) else f"{finding.false_alarm:.2g}"
    null = "–" if math.isnan(finding.null) else f"{finding.null:.3g}"
    return f"{finding.score:.3g}", f"{finding.threshold:g}", null, rate


def record_lines(record: RunRecord, spikes: Sequence[Spike], width: int) -> list[View]:
    """The size of a run, its curves and its spikes."""
    if not (history := record.history):
        return [f"{record.place}: no steps are recorded yet"]
    last, norms = history[-1], [m.grad_norm for m in history if m.grad_norm is not None]
    size = f"{record.place}: {record.state}, {last.step:,} steps; loss {history[0].loss:.3f} → {last.loss:.3f}"
    size += "" if record.held_out_loss is None else f", held-out {record.held_out_loss:.3f}"
    size += f"; gradient norm {norms[0]:.3g} → {norms[-1]:.3g}, largest {max(norms):.3g}" if norms else ""
    rows = [(f"{s.step:,}", s.what, f"{s.value:.4g}", f"{s.usual:.4g}", f"{s.tokens:,}") for s in spikes]
    found = TextTable(SPIKES, rows, right=SPIKES[2:]) if rows else "no spikes of loss or gradient norm"
    return [size, *run_curves([history], width), "", found]


def checkpoint_table(states: Sequence[CheckpointState]) -> TextTable:
    """A row for each checkpoint."""
    cells = [(f"{c.step:,}", *("–" if x is None else f"{x:.3g}" for x in c[1:5]), c.head) for c in states]
    return TextTable(CHECKPOINTS, cells, right=CHECKPOINTS[:5])
