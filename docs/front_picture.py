"""The picture of the front page: a swap, and what followed from it, drawn from docs/figures/front.json.

    python docs/front_picture.py            write docs/_static/front.svg

Four bands, one below the other, so that the text is legible on a page of 400 pixels: the line of the spec that changes, the
cost, the laws, and the training loss of both models. The colors follow the scheme of the reader, on a ground of its own.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FIGURE, PICTURE = ROOT / "docs/figures/front.json", ROOT / "docs/_static/front.svg"
WIDTH, HEIGHT, LEFT, RIGHT = 480, 560, 20, 460
STYLE = """
.ground{fill:#fff;stroke:#c8ced6}.ink{fill:#1b2430}.soft{fill:#55606e}.rule{stroke:#dfe3e8}
.before{fill:#7a8694}.after{fill:#0b6bcb}.line-before{stroke:#7a8694}.line-after{stroke:#0b6bcb}.gone{fill:#b42318}.new{fill:#0b6bcb}.good{fill:#157347}
@media (prefers-color-scheme:dark){
.ground{fill:#161b22;stroke:#39424e}.ink{fill:#e8edf3}.soft{fill:#a9b4c0}.rule{stroke:#2d3540}
.before{fill:#8f9baa}.after{fill:#58a6ff}.line-before{stroke:#8f9baa}.line-after{stroke:#58a6ff}.gone{fill:#ff8f85}.new{fill:#58a6ff}.good{fill:#4cc38a}}
text{font:15px system-ui,sans-serif}.mono{font:15px ui-monospace,monospace}.title{font-weight:600}.end{text-anchor:end}
"""


def draw(data: dict[str, Any]) -> str:
    """The picture of a figure."""
    result = data["result"]
    values = {row["name"]: row["value"] for row in result["rows"]} | result["counts"]
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="540" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'aria-label="A swap of one part, and what followed from it">',
        f"<style>{STYLE}</style>",
        f'<rect class="ground" x="1" y="1" width="{WIDTH - 2}" height="{HEIGHT - 2}" rx="10"/>',
        *spec(),
        *cost(values),
        *laws(values),
        *loss(result["curves"], values),
        *text(LEFT, HEIGHT - 16, f"python benchmarks/front.py · commit {data['taken']['commit']}", "soft"),
        "</svg>\n",
    ]
    return "\n".join(lines)


def text(x: float, y: float, words: str, look: str = "ink") -> Iterator[str]:
    """A line of text."""
    yield f'<text x="{x:g}" y="{y:g}" class="{look}" xml:space="preserve">{escape(words)}</text>'


def heading(y: float, title: str, remark: str = "") -> Iterator[str]:
    """The title of a band, over a rule."""
    if y > 40:
        yield f'<line class="rule" x1="{LEFT}" y1="{y - 25}" x2="{RIGHT}" y2="{y - 25}"/>'
    yield from text(LEFT, y, title, "ink title")
    if remark:
        yield from text(RIGHT, y, remark, "soft end")


def spec() -> Iterator[str]:
    """The change of the spec."""
    yield from heading(34, "Swap one part of llama-tiny")
    yield from text(LEFT, 62, "- mixer: {kind: attention, kv_heads: 2}", "mono gone")
    yield from text(LEFT, 84, "+ mixer: gated_deltanet", "mono new")


def cost(values: dict[str, float]) -> Iterator[str]:
    """Parameters, FLOPs and decode state on both sides."""
    yield from heading(130, "Cost", "before → after")
    (state,) = (name.removeprefix("before: ") for name in values if name.startswith("before: bytes"))
    length = int(state.split(" tokens")[0].rpartition(" ")[2])
    rows = [
        ("parameters", *(f"{values[f'{side}: parameters']:,.0f}" for side in ("before", "after"))),
        ("matmul, per token", *(f"{values[f'{side}: matmul FLOP per token'] / 1e6:.1f} MFLOP" for side in ("before", "after"))),
        (f"decode state, {length:,} tokens", *(mebibytes(values[f"{side}: {state}"]) for side in ("before", "after"))),
    ]
    for i, (what, before, after) in enumerate(rows):
        y = 156 + 24 * i
        yield from text(LEFT, y, what)
        yield from text(342, y, before, "before end")
        yield from text(RIGHT, y, after, "after end")
    kept, new, lost = (values[f"tensors {status}"] for status in ("kept", "new", "impossible"))
    yield from text(LEFT, 228, f"trained tensors: {kept:g} kept, {lost:g} not transferable, {new:g} new", "soft")


def mebibytes(count: float) -> str:
    """A number of bytes."""
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.0f} KiB"


def laws(values: dict[str, float]) -> Iterator[str]:
    """A square for each law that holds or fails."""
    passed, failed, without = (round(values[f"laws {state}"]) for state in ("passed", "failed", "not applicable"))
    yield from heading(274, "Laws of the new model", f"{passed} hold, {failed} fail, {without} not applicable")
    for i in range(passed + failed):
        yield f'<rect class="{"good" if i < passed else "gone"}" x="{LEFT + 18 * i}" y="288" width="13" height="13" rx="3"/>'


def loss(curves: dict[str, list[float]], values: dict[str, float]) -> Iterator[str]:
    """Training loss against steps."""
    steps = len(curves["before"])
    yield from heading(344, "Training loss", f"{steps} steps, equal batches, rate not tuned")
    top, bottom = math.ceil(max(map(max, curves.values()))), math.floor(min(map(min, curves.values())))
    begin, end, low, high = LEFT + 24, 338, 510, 364
    for level in range(bottom, top + 1):
        y = low - (low - high) * (level - bottom) / (top - bottom)
        yield f'<line class="rule" x1="{begin}" y1="{y:.1f}" x2="{end}" y2="{y:.1f}"/>'
        yield from text(LEFT, y + 5, str(level), "soft")
    for side, label in (("before", "attention"), ("after", "Gated DeltaNet")):
        points = [
            f"{begin + (end - begin) * i / (steps - 1):.1f},{low - (low - high) * (value - bottom) / (top - bottom):.1f}"
            for i, value in enumerate(curves[side])
        ]
        yield f'<polyline class="line-{side}" points="{" ".join(points)}" fill="none" stroke-width="2.5"/>'
        y = float(points[-1].partition(",")[2])
        yield from text(end + 6, y + 2, label, side)
        yield from text(end + 6, y + 20, f"held-out {values[f'{side}: held-out loss after {steps} steps']:.2f}", side)


def main() -> None:
    """Write the picture."""
    PICTURE.write_text(draw(json.loads(FIGURE.read_text(encoding="utf-8"))), encoding="utf-8")
    sys.stdout.write(f"{PICTURE.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()
