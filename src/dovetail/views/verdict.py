"""Show a verdict on a terminal and as an HTML page.

Each layer is one line; the layer in which the sides diverge has a line per tap. The length of a bar is the gap from 1e-16 to
1, in powers of ten.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite, log10

from rich.console import Group
from rich.table import Table
from rich.text import Text

from dovetail.base.errors import printable
from dovetail.proof.compare.check import Pass, Verdict
from dovetail.proof.compare.comparison import Tap, short
from dovetail.proof.compare.match import layer_of
from dovetail.proof.compare.piece import OTHER_WEIGHTS
from dovetail.proof.compare.record import ANSWER
from dovetail.views.bar import bar as blocks
from dovetail.views.page import body

DECADES, CELLS = 16, 16
COLORS = {"equal": "green", "rounding": "yellow", "structural": "red", "non-finite": "red"}
MARKS = {"equal": "✓", "rounding": "~", "structural": "✗", "non-finite": "✗"}
# the activation at a tap, by its address within a layer
MEANINGS = {
    "in": "the input of the layer",
    "": "the output of the layer",
    "mixer.o.in": "the outputs of the heads, before the output projection",
    "mixer.o": "the output of attention",
    "ffn_norm.in": "the residual stream after the mixer",
    "ffn.down.in": "the hidden layer after the activation",
    "ffn.down": "the output of the feed-forward",
    "norm": "the residual stream after the last norm",
    ANSWER: "the logits, or the output of the head",
}


def within(address: str) -> str:
    """An address without its layer."""
    return address.removeprefix(layer_of(address)).lstrip(".")


def meaning(address: str) -> str:
    """The activation at an address in words; empty where no words are known."""
    return MEANINGS.get(within(address), "") or MEANINGS.get(address, "")


def bar(gap: float) -> str:
    """A bar as long as the number of powers of ten of the gap above 1e-16."""
    if gap <= 0:
        return ""
    return blocks(min(max(log10(min(gap, 10.0)) + DECADES, 0.0), DECADES) / DECADES, CELLS)


def number(gap: float) -> str:
    """A gap with two digits and an exponent."""
    return "0" if gap == 0 else f"{gap:.1e}" if isfinite(gap) else "not finite"


def grouped(taps: Sequence[Tap]) -> dict[str, list[Tap]]:
    """Taps by layer; a tap outside of layers by its own address."""
    groups: dict[str, list[Tap]] = {}
    for tap in taps:
        layer = layer_of(tap.address)
        name = "embedding" if tap.address == "layers.0.in" else layer if "layers." in layer else tap.address
        groups.setdefault(name, []).append(tap)
    return groups


def worst(taps: Sequence[Tap]) -> Tap:
    """The tap with the most serious status, and among those with the largest gap."""
    return max(taps, key=lambda tap: (list(COLORS).index(tap.status), tap.exact if tap.status == "structural" else tap.gap))


def view(verdict: Verdict, *, every: bool = False) -> Group:
    """The verdict on a terminal; with `every`, a line per tap."""
    dtypes = [short(dtype) for dtype in verdict.comparison.dtypes]
    head = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    for letter, side, dtype in (("A", verdict.a, dtypes[0]), ("B", verdict.b, dtypes[1])):
        head.add_row(Text(letter, "bold"), Text(side), Text(dtype, "dim"))
    count = _shown_pass(verdict)
    shown: list[Text | Table] = [head, Text(count, "dim"), Text(), _table(verdict, dtypes, every), Text()]
    shown += sentences(verdict)
    return Group(*shown)


def _table(verdict: Verdict, dtypes: list[str], every: bool) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    coarse = dtypes[0] if dtypes[0] == dtypes[1] else "/".join(dtypes)
    # of a dump both gaps are to A in float64: the largest; and of the largest and the median the one nearer to its bound
    gaps = ("largest gap", "deciding gap") if verdict.recorded else (f"gap, {coarse}", "gap, float64")
    for name, justify in (("", "left"), (gaps[0], "right"), (gaps[1], "right"), ("", "left"), ("", "left")):
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    first, passed = verdict.first, False
    for name, taps in grouped(verdict.comparison.taps).items():
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
    color = COLORS[tap.status]
    note = "← first" if first else ""
    style = f"bold {color}" if first else "dim" if dim else ""
    gap = tap.exact if tap.status == "structural" else tap.gap
    table.add_row(
        Text(name, style),
        Text(number(tap.gap), style),
        Text(number(tap.exact), style),
        Text(f"{MARKS[tap.status]} {bar(gap)}", f"dim {color}" if dim else color),
        Text(note, style),
    )


def pass_line(one: Pass) -> Text:
    """One pass in a line, which is printed when it is known: its largest gaps, in its dtype and in float64."""
    taps = one.comparison.taps
    status = one.comparison.status
    gaps = ", ".join(f"{number(max((gap(tap) for tap in taps), default=0.0))} in {name}" for name, gap in _gaps(one).items())
    size = f"{one.prompt.batch} × {one.prompt.n} tokens, {len(taps)} taps"
    return Text.assemble((f"{MARKS[status]} ", COLORS[status]), f"{one.name}: {size}; the largest gap is {gaps}")


def _gaps(one: Pass) -> dict[str, Callable[[Tap], float]]:
    coarse = "/".join(dict.fromkeys(short(dtype) for dtype in one.comparison.dtypes))
    return {coarse: lambda tap: tap.gap, "float64": lambda tap: tap.exact}


def sentences(verdict: Verdict) -> list[Text]:
    """The verdict in sentences."""
    status = verdict.status
    cause = _cause(verdict) if status == "structural" and verdict.deciding.across else []
    found = verdict.cause is not None or bool(verdict.weights)
    sentence = [Text.assemble((status, f"bold {COLORS[status]}"), f": {_sentence(verdict)}")]
    lines = cause + sentence if found else sentence + cause  # a cause that was found is the headline
    tested, not_tested = verdict.coverage()
    lines += [Text(f"note: {note}", "yellow") for note in verdict.notes]
    return [*lines, Text(f"tested: {tested}", "dim"), Text(f"not tested: {not_tested}", "dim")]


def _shown_pass(verdict: Verdict) -> str:
    """The pass that the table shows."""
    shown = verdict.deciding
    return f"{shown.name}: {shown.prompt.batch} × {shown.prompt.n} tokens, {len(shown.comparison.taps)} taps compared"


def _sentence(verdict: Verdict) -> str:
    first = verdict.first
    where = "" if first is None else first.address + (f" ({meaning(first.address)})" if meaning(first.address) else "")
    if verdict.status == "non-finite":
        if first is not None and first.nonfinite:
            text = f"NaN or infinity from {where} on, first in {first.nonfinite}; nothing after it can be compared"
        else:
            text = "a weight is NaN or infinite"
        return text + (
            f". Weights that are not finite: {', '.join(map(printable, verdict.nonfinite))}" if verdict.nonfinite else ""
        )
    if verdict.recorded and verdict.status != "structural":
        return _recorded_sentence(verdict)
    if first is None:
        largest = max((tap.exact for one in verdict.passes for tap in one.comparison.taps), default=0.0)
        return f"the same function; the largest gap in float64 is {number(largest)}"
    during = "" if verdict.deciding.name == "forward" else f" in {verdict.deciding.name}"
    if verdict.status == "rounding":
        worst = first.gap > first.allowed
        gap, allowed = (first.gap, first.allowed) if worst else (first.typical, first.allowed_typical)
        bound = f"the {'largest' if worst else 'median'} gap{during} is {number(gap)}, where {number(allowed)} is allowed"
        own = f"A is up to {number(first.own_a)} from its own float64 run there, B {number(first.own_b)}"
        return f"the same function in float64, but {bound}, from {where} on. {own}"
    gap = f"the gap in float64 is {number(first.exact)}, where rounding allows {number(first.allowed_exact)}"
    if not verdict.deciding.across:
        return f"decoding with a cache is another function than the full forward pass{during}, from {where} on; {gap}"
    return f"two different functions{during} from {where} on; {gap}"


def _recorded_sentence(verdict: Verdict) -> str:
    """The sentence on a dump that is not structurally different: it has no float64 run."""
    dtype = short(verdict.comparison.dtypes[1])
    taps = [tap for one in verdict.passes for tap in one.comparison.taps]
    gap = f"the largest gap to A in float64 is {number(max((tap.gap for tap in taps), default=0.0))}"
    if verdict.status == "equal":
        return f"the same function, as far as {dtype} shows; {gap}"
    return f"no more than rounding in {dtype}: {gap}. A smaller bug cannot be seen; record in float32 to decide"


def _cause(verdict: Verdict) -> list[Text]:
    cause = verdict.cause
    if cause is not None:
        same, changed = ("B", "A") if cause.side == "a" else ("A", "B")
        candidates = "1 candidate" if cause.tried == 1 else f"{cause.tried} candidates"
        tried = f"{number(cause.remaining)} of the gap remains, {candidates} tried"
        text = f"{same} computes the output of {changed} with {cause.description} ({tried})"
        return [Text.assemble(("cause", "bold"), ": ", (cause.name, "bold"), f". {text}")]
    if verdict.weights:
        lines = [Text.assemble(("cause", "bold"), ": ", (OTHER_WEIGHTS, "bold"))]
        return lines + [Text(f"  {one.path}: {one.how}, by {number(one.gap)} of the largest value") for one in verdict.weights]
    unknown = "no known cause explains the difference" if verdict.searched else "not searched"
    return [Text.assemble(("cause", "bold"), f": {unknown}")]


def verdict_body(verdict: Verdict) -> str:
    """The content of the page."""
    dtypes = [short(dtype) for dtype in verdict.comparison.dtypes]
    headline, *lines = [line.plain for line in sentences(verdict)]
    return body(
        "verify_taps.html",
        verdict=verdict,
        headline=headline.removeprefix(f"{verdict.status}: "),
        sides=[("A", verdict.a, dtypes[0]), ("B", verdict.b, dtypes[1])],
        measures=_shown_pass(verdict),
        lines=lines,
        layers=grouped(verdict.comparison.taps),
        within=within,
        meaning=meaning,
        number=number,
        width=_width,
    )


def _width(tap: Tap) -> str:
    """The length of a bar on the page."""
    gap = tap.exact if isfinite(tap.exact) else 1.0
    return "0%" if gap <= 0 else f"{min(max(log10(gap) + DECADES, 0.0), DECADES) / DECADES:.0%}"
