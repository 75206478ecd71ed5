"""A verdict for people: on a terminal and as one HTML page.

Layers that agree are one line each; the layer in which the sides part is shown tap by tap; what follows is one line again. A
bar is as long as a gap is large, from 1e-16 to 1 in powers of ten.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import inf, isfinite, log10

from rich.console import Group
from rich.table import Table
from rich.text import Text

from dovetail.look.bar import bar as blocks
from dovetail.verification.check import Verdict, state
from dovetail.verification.match import layer_of
from dovetail.verification.record import ANSWER
from dovetail.verification.walk import Tap

DECADES, CELLS = 16, 16
COLOURS = {"equal": "green", "rounding": "yellow", "structural": "red"}
MARKS = {"equal": "✓", "rounding": "~", "structural": "✗"}
# what a tap is, by its name within a layer
MEANS = {
    "in": "what the layer is given",
    "": "what the layer gives",
    "mixer.o.in": "what the heads give, before the output matrix",
    "mixer.o": "what attention adds",
    "ffn_norm.in": "the stream after the mixer",
    "ffn.down.in": "the hidden layer after the activation",
    "ffn.down": "what the feed-forward adds",
    "norm": "the stream after the last norm",
    ANSWER: "the logits, or what the head gives",
}


def within(address: str) -> str:
    """An address without its layer."""
    return address.removeprefix(layer_of(address)).lstrip(".")


def meaning(address: str) -> str:
    """What stands at an address, in words; empty where its name says it."""
    return MEANS.get(within(address), "") or MEANS.get(address, "")


def bar(gap: float) -> str:
    """As many blocks as the gap has powers of ten above 1e-16."""
    if gap <= 0:
        return ""
    return blocks(min(max(log10(min(gap, 10.0)) + DECADES, 0.0), DECADES) / DECADES, CELLS)


def number(gap: float) -> str:
    """A gap in three characters and an exponent."""
    return "0" if gap == 0 else f"{gap:.1e}" if isfinite(gap) else "no number"


def grouped(taps: Sequence[Tap]) -> dict[str, list[Tap]]:
    """Taps by layer; what is no layer's by its own address."""
    found: dict[str, list[Tap]] = {}
    for tap in taps:
        layer = layer_of(tap.address)
        name = "embedding" if tap.address == "layers.0.in" else layer if "layers." in layer else tap.address
        found.setdefault(name, []).append(tap)
    return found


def worst(taps: Sequence[Tap]) -> Tap:
    """The tap with the largest gap, in float64 first."""
    return max(taps, key=lambda tap: (tap.structural, tap.exact if tap.structural else tap.gap))


def view(verdict: Verdict, *, every: bool = False) -> Group:
    """The verdict on a terminal; with `every`, each tap has its line."""
    dtypes = [str(dtype).removeprefix("torch.") for dtype in verdict.walked.dtypes]
    head = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    for letter, side, dtype in (("A", verdict.a, dtypes[0]), ("B", verdict.b, dtypes[1])):
        head.add_row(Text(letter, "bold"), Text(side), Text(dtype, "dim"))
    count = f"{verdict.prompt.batch} × {verdict.prompt.n} tokens, {len(verdict.walked.taps)} taps compared"
    shown: list[Text | Table] = [head, Text(count, "dim"), Text(), _table(verdict, dtypes, every), Text()]
    shown += said(verdict)
    return Group(*shown)


def _table(verdict: Verdict, dtypes: list[str], every: bool) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    coarse = dtypes[0] if dtypes[0] == dtypes[1] else "/".join(dtypes)
    for name, justify in (("", "left"), (f"gap, {coarse}", "right"), ("gap, float64", "right"), ("", "left"), ("", "left")):
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    first, passed = verdict.first, False
    for name, taps in grouped(verdict.walked.taps).items():
        here = first is not None and any(tap is first for tap in taps)
        if (here or every) and len(taps) > 1:
            table.add_row(Text(name, "bold"))
            for tap in taps:
                _row(table, f"  {within(tap.address) or 'out'}", tap, tap is first, passed and not here)
        else:
            _row(table, name, worst(taps), here, passed)
        passed = passed or here
    return table


def _row(table: Table, name: str, tap: Tap, first: bool, dim: bool) -> None:
    word = state(tap)
    color = COLOURS[word]
    note = "← first" if first else ""
    style = f"bold {color}" if first else "dim" if dim else ""
    gap = tap.exact if tap.structural else tap.gap
    table.add_row(
        Text(name, style),
        Text(number(tap.gap), style),
        Text(number(tap.exact), style),
        Text(f"{MARKS[word]} {bar(gap)}", f"dim {color}" if dim else color),
        Text(note, style),
    )


def said(verdict: Verdict) -> list[Text]:
    """The verdict in sentences."""
    first, word, color = verdict.first, verdict.word, COLOURS[verdict.word]
    lines: list[Text] = []
    if first is None:
        largest = max((tap.exact for tap in verdict.walked.taps), default=0.0)
        text = f": the same function; in float64 {number(largest)} apart at most"
        lines.append(Text.assemble(("equal", f"bold {color}"), text))
    elif word == "rounding":
        far = f"{number(first.gap)}, where clean pairs are {number(first.allowed)} apart at most"
        own = f"A is {number(first.own_a)} from its own float64 run there, B {number(first.own_b)}"
        text = f": the same function in float64, and {far}, from {first.address} on. {own}"
        lines.append(Text.assemble(("rounding", f"bold {color}"), text))
    else:
        what = meaning(first.address)
        lines.append(
            Text.assemble(
                ("structural", f"bold {color}"),
                f": two different functions from {first.address} on" + (f" ({what})" if what else ""),
                f"; {number(first.exact)} apart in float64, where rounding allows {number(first.allowed_exact)}",
            )
        )
        lines += _why(verdict)
    lines += [Text(f"note: {note}", "dim") for note in verdict.notes]
    return lines


def _why(verdict: Verdict) -> list[Text]:
    cause = verdict.cause
    if cause is not None:
        same, changed = ("B", "A") if cause.side == "a" else ("A", "B")
        text = (
            f"{same} gives what {changed} gives with {cause.says} ({number(cause.left)} left of the gap, {cause.tried} tried)"
        )
        return [Text.assemble(("cause", "bold"), ": ", (cause.name, "bold"), f". {text}")]
    if verdict.weights:
        lines = [Text.assemble(("cause", "bold"), ": ", ("other numbers in the weights", "bold"))]
        return lines + [Text(f"  {one.path}: {one.how}, {number(one.gap)} of the largest") for one in verdict.weights]
    return [Text.assemble(("cause", "bold"), ": not found among the known ones")]


STYLE = """
body{font:14px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1a1d21;background:#fff}
h1{font-size:1.3rem} table{border-collapse:collapse;width:100%} td,th{padding:.15rem .6rem;text-align:left;white-space:nowrap}
th{color:#667;font-weight:500;border-bottom:1px solid #dde} td.n{text-align:right;font-variant-numeric:tabular-nums}
tr.layer td{padding-top:.6rem;font-weight:600} tr.first td{background:#fdecea;font-weight:600}
.bar{height:.7rem;border-radius:2px} .word{color:#fff;padding:.1rem .5rem;border-radius:4px}
.equal{background:#3a9a5b}.rounding{background:#d9a514}.structural{background:#c7362b}
p{margin:.4rem 0} .dim{color:#667} code{background:#f2f4f7;padding:0 .25rem;border-radius:3px}
@media(prefers-color-scheme:dark){body{background:#14171a;color:#e6e8ea}tr.first td{background:#3a1c1a}
code{background:#23282d}th{border-color:#333}}
"""


def page(verdict: Verdict) -> str:
    """The verdict as one HTML page that needs nothing beside it."""
    dtypes = [str(dtype).removeprefix("torch.") for dtype in verdict.walked.dtypes]
    rows: list[str] = []
    for name, taps in grouped(verdict.walked.taps).items():
        rows.append(f'<tr class="layer"><td colspan="6">{escape(name)}</td></tr>')
        rows += [_html_row(tap, tap is verdict.first) for tap in taps]
    sentences = "".join(f"<p>{escape(line.plain)}</p>" for line in said(verdict))
    count = f"{verdict.prompt.batch} × {verdict.prompt.n} tokens, {len(verdict.walked.taps)} taps compared"
    titles = (f"gap in {dtypes[0]}", "gap in float64", "A from its float64", "B from its float64", "float64, 1e-16 to 1")
    header = "".join(f"<th>{escape(text)}</th>" for text in ("", *titles))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>verify: {verdict.word}</title><style>{STYLE}</style>'
        f'<h1>dovetail verify <span class="word {verdict.word}">{verdict.word}</span></h1>'
        f"<p>A <code>{escape(verdict.a)}</code> {dtypes[0]}<br>B <code>{escape(verdict.b)}</code> {dtypes[1]}</p>"
        f'<p class="dim">{escape(count)}</p>{sentences}<table><tr>{header}</tr>{"".join(rows)}</table></html>\n'
    )


def _html_row(tap: Tap, first: bool) -> str:
    word = state(tap)
    gap = tap.exact if tap.exact != inf else 1.0
    width = 0.0 if gap <= 0 else min(max(log10(gap) + DECADES, 0.0), DECADES) / DECADES * 100
    numbers = "".join(f'<td class="n">{number(one)}</td>' for one in (tap.gap, tap.exact, tap.own_a, tap.own_b))
    name, title = escape(within(tap.address) or "out"), escape(meaning(tap.address))
    shown = f'<td style="width:12rem"><div class="bar {word}" style="width:{width:.0f}%"></div></td>'
    return f'<tr{" class=first" if first else ""}><td title="{title}">{name}</td>{numbers}{shown}</tr>'
