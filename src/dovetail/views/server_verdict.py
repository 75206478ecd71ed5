"""The verdict on a server in words: a table on a terminal, and an HTML page."""

from __future__ import annotations

from rich.console import Group
from rich.text import Text

from dovetail.proof.compare.comparison import Status
from dovetail.proof.compare.server import ServerRow, ServerVerdict
from dovetail.views.console import plain_table
from dovetail.views.page import body

SENTENCES: dict[Status, str] = {
    "equal": "first tokens agree, and log-probs agree to rounding",
    "structural": "more than rounding; the layers of a server cannot be compared",
    "non-finite": "a log-prob is NaN or infinite, and is equal to nothing",
}
COLUMNS = ("prompt", "first token, A", "first token, B", "log-prob gap", "allowed")


def _cells(i: int, row: ServerRow) -> tuple[str, ...]:
    """One row of the table, by COLUMNS."""
    theirs = row.text if row.theirs is None else str(row.theirs)
    gap = "not finite" if row.nonfinite else f"{row.gap:.4f}"
    return str(i), str(row.ours), theirs, gap, f"{row.allowed:.4f}"


def row_line(number: int, row: ServerRow) -> Text:
    """One prompt in a line, which is printed when it is known."""
    mark = ("✗ ", "red") if row.differs else ("✓ ", "green")
    pairs = zip(COLUMNS, _cells(number, row), strict=True)
    return Text.assemble(mark, ", ".join(f"{name} {cell}" for name, cell in pairs))


def view(verdict: ServerVerdict) -> Group:
    """The verdict on a terminal."""
    table = plain_table(*COLUMNS, "", right=COLUMNS, header=True)
    for i, row in enumerate(verdict.rows):
        mark = Text("✗" if row.differs else "✓", "red" if row.differs else "green")
        table.add_row(*(Text(cell, "bold red" if row.differs else "") for cell in _cells(i, row)), mark)
    color = "bold red" if verdict.failed else "bold green"
    lines = [Text.assemble((verdict.status, color), f": {SENTENCES[verdict.status]}")]
    lines += [Text(f"tested: {verdict.tested()}", "dim"), Text(f"not tested: {verdict.not_tested()}", "dim")]
    sides = [Text.assemble(("A ", "bold"), verdict.a), Text.assemble(("B ", "bold"), verdict.b)]
    return Group(*sides, Text(), table, Text(), *lines)


def server_body(verdict: ServerVerdict) -> str:
    """The content of the page."""
    return body(
        "verify.html",
        verdict=verdict,
        headline=SENTENCES[verdict.status],
        sides=[("A", verdict.a, ""), ("B", verdict.b, "")],
        measures="",
        lines=[f"tested: {verdict.tested()}", f"not tested: {verdict.not_tested()}"],
        columns=COLUMNS,
        numbers=COLUMNS,
        rows=[_cells(i, row) for i, row in enumerate(verdict.rows)],
        marked=[i for i, row in enumerate(verdict.rows) if row.differs],
    )
