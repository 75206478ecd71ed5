"""The verdict on rollouts in words: a table on a terminal, and an HTML page."""

from __future__ import annotations

from rich.console import Group
from rich.text import Text

from dovetail.base.errors import printable
from dovetail.proof.rollouts.verdict import RATIOS, GapCause, RolloutStatus, RolloutVerdict
from dovetail.views.bar import bar
from dovetail.views.console import plain_table
from dovetail.views.page import body

COLORS: dict[RolloutStatus, str] = {
    "equal": "green",
    "rounding": "yellow",
    "sampling": "yellow",
    "stale": "yellow",
    "structural": "red",
}
SENTENCES: dict[RolloutStatus, str] = {
    "equal": "the sampler's log-probs are the trainer's",
    "rounding": "the gap is that of another dtype or batch shape",
    "sampling": "the same model; the settings of the sampler explain the gap",
    "stale": "older weights explain the gap",
    "structural": "the sampler's log-probs are not those of this model",
}
COLUMNS = ("cause", "share", "mean |c|", "what", "formula", "token that shows it most")
NUMBERS = ("share", "mean |c|")
CELLS = 10


def _cells(cause: GapCause) -> tuple[str, ...]:
    """One row of the table, by COLUMNS."""
    shown = cause.token
    where = f"line {shown.line}, token {shown.index} (id {shown.token}): {shown.value:+.3g}"
    return cause.name, f"{cause.share:.1%}", f"{cause.mean_abs:.2g}", printable(cause.description), cause.formula, where


def _measures(verdict: RolloutVerdict) -> str:
    """The statistics in one line."""
    one = verdict.statistics
    pearson = "" if one.pearson is None else f", correlation of probs {one.pearson:.4f}"
    ratios = f"ratio outside [{RATIOS[0]}, {RATIOS[1]}] at {one.outside:.1%} of tokens, at most {one.max_ratio:.3g}"
    gap = f"δ = s − t: mean {one.mean:+.2g}, mean |δ| {one.mean_abs:.2g}, max {one.max_abs:.2g}"
    return f"{gap}; KL(q‖p) {one.k3:.2g} (k3); {ratios}{pearson}"


def lines(verdict: RolloutVerdict) -> list[tuple[str, str]]:
    """(style, sentence) below the table; the first is the verdict."""
    found = [("", f"sampler, as fitted: {verdict.settings}")]
    found += [("red", f"contradiction: {printable(contradiction)}") for contradiction in verdict.contradictions]
    found += [("yellow", f"note: {printable(note)}") for note in verdict.notes]
    return [*found, ("dim", f"tested: {verdict.tested}"), ("dim", f"not tested: {verdict.not_tested}")]


def view(verdict: RolloutVerdict) -> Group:
    """The verdict on a terminal."""
    color = COLORS[verdict.status]
    table = plain_table(*COLUMNS, "", right=NUMBERS, header=True)
    for i, one in enumerate(verdict.causes):
        style = "bold" if i == 0 else ""
        table.add_row(*(Text(cell, style) for cell in _cells(one)), Text(bar(max(0.0, min(one.share, 1.0)), CELLS), color))
    counts = f"{verdict.rollouts} rollouts, {verdict.tokens} sampled tokens, trainer in {verdict.dtype}"
    head = [
        Text.assemble(("trainer ", "bold"), printable(verdict.a)),
        Text.assemble(("sampler ", "bold"), printable(verdict.b)),
    ]
    said = Text.assemble((verdict.status, f"bold {color}"), f": {SENTENCES[verdict.status]}")
    below = [Text(sentence, style) for style, sentence in lines(verdict)]
    return Group(*head, Text(counts, "dim"), Text(), Text(_measures(verdict)), Text(), table, Text(), said, *below)


def rollouts_body(verdict: RolloutVerdict) -> str:
    """The content of the page."""
    return body(
        "verify.html",
        verdict=verdict,
        headline=SENTENCES[verdict.status],
        sides=[("trainer", verdict.a, verdict.dtype), ("sampler", verdict.b, "")],
        measures=_measures(verdict),
        lines=[sentence for _, sentence in lines(verdict)],
        columns=COLUMNS,
        numbers=NUMBERS,
        rows=[_cells(cause) for cause in verdict.causes],
        marked=[0],
    )
