"""What the site makes of the chapters of the book besides their pages: notebooks, and the map on the first page.

page.md ─ split at code ─> reference/site/notebooks/page.ipynb      text and commands as they are, code as cells to run
index.md, links ─────────> reference/book_map.svg                   a column per part, a node per chapter, a line per link
"""

from __future__ import annotations

import json
import re
from html import escape
from pathlib import Path
from typing import Any

BOOK = Path(__file__).parent / "book"
CODE = re.compile(r"^```(\w+)\n(.*?)^```\n", re.DOTALL | re.MULTILINE)
SKIPPED = re.compile(r"<!-- no run:[^>]*-->\s*\Z")  # before a block that takes long, or needs what is not there
RUN = {"python": "", "bash": "%%bash\n"}  # language of a block -> first line of its cell
PART = re.compile(r"```\{toctree\}\n:caption: (.*?)\n(.*?)```", re.DOTALL)
ENTRY, LINK = re.compile(r"^(.*?) <(\w+)>$", re.MULTILINE), re.compile(r"\]\((\w+)\.md")
WIDTH, HEIGHT, GAP, STEP, TOP = 148, 40, 26, 62, 44  # of a node, and between nodes


def parts() -> dict[str, dict[str, str]]:
    """Part -> {chapter: title}, in the order of the book."""
    index = (BOOK / "index.md").read_text(encoding="utf-8")
    entries = {caption: {name: title for title, name in ENTRY.findall(body)} for caption, body in PART.findall(index)}
    return {caption: chapters for caption, chapters in entries.items() if chapters}  # the last list has only a page outside


def links() -> list[tuple[str, str]]:
    """(earlier chapter, later chapter) where the page of one names the other."""
    order = [name for chapters in parts().values() for name in chapters]
    pairs = {(name, other) for name in order for other in LINK.findall((BOOK / f"{name}.md").read_text(encoding="utf-8"))}
    ranked = {tuple(sorted(pair, key=order.index)) for pair in pairs if set(pair) <= set(order) and pair[0] != pair[1]}
    return sorted(ranked, key=lambda pair: [order.index(name) for name in pair])  # type: ignore[return-value]


def map_svg() -> str:
    """The map, in the colors of the page; a node is a link to its chapter."""
    columns = parts()
    places = {name: (x, y) for x, names in enumerate(columns.values()) for y, name in enumerate(names)}
    titles = {name: title for names in columns.values() for name, title in names.items()}
    width = len(columns) * (WIDTH + GAP) + 2  # with room for curves to the right of the last column
    height = TOP + max(map(len, columns.values())) * STEP
    out = [
        f'<div class="book-map"><svg viewBox="-1 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="The chapters of the book in {len(columns)} parts; lines join chapters that name each other">'
    ]
    out += [
        f'<text class="part" x="{x * (WIDTH + GAP) + WIDTH / 2}" y="22">{escape(caption)}</text>'
        for x, caption in enumerate(columns)
    ]
    out += [f'<path class="link" d="{_curve(places[a], places[b])}"/>' for a, b in links()]
    for name, place in places.items():
        x, y = _corner(place)
        lines = _wrapped(titles[name])
        rows = "".join(
            f'<tspan x="{x + WIDTH / 2}" y="{y + HEIGHT / 2 + 5 + 15 * (i - (len(lines) - 1) / 2)}">{escape(line)}</tspan>'
            for i, line in enumerate(lines)
        )
        box = f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="6"/>'
        out.append(f'<a href="{name}.html">{box}<text>{rows}</text></a>')
    return "".join([*out, "</svg></div>"]) + "\n"


def _corner(place: tuple[int, int]) -> tuple[int, int]:
    return place[0] * (WIDTH + GAP), TOP + place[1] * STEP


def _curve(a: tuple[int, int], b: tuple[int, int]) -> str:
    """From the right side of one node to the left side of a later one; within a column, around its right side."""
    (ax, ay), (bx, by) = _corner(a), _corner(b)
    ax, ay, by = ax + WIDTH, ay + HEIGHT // 2, by + HEIGHT // 2
    if a[0] == b[0]:
        return f"M{ax} {ay}C{ax + GAP} {ay} {ax + GAP} {by} {ax} {by}"
    return f"M{ax} {ay}C{ax + GAP} {ay} {bx - GAP} {by} {bx} {by}"


def _wrapped(title: str, most: int = 20) -> list[str]:
    lines = [""]
    for word in title.split():
        if lines[-1] and len(lines[-1]) + len(word) >= most:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def notebook(page: str) -> dict[str, Any]:
    """A chapter as a notebook: Python and commands that the tests run are cells, everything else is text."""
    cells, end = list[dict[str, Any]](), 0

    def text(part: str) -> None:
        if part.strip():
            cells.append({"cell_type": "markdown", "metadata": {}, "source": part.strip() + "\n"})

    for block in CODE.finditer(page):
        if block[1] in RUN and not SKIPPED.search(page, 0, block.start()):
            text(page[end : block.start()])
            source = RUN[block[1]] + block[2].rstrip("\n")
            cells.append({"cell_type": "code", "metadata": {}, "source": source, "outputs": [], "execution_count": None})
            end = block.end()
    text(page[end:])
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def write_extras(place: Path) -> None:
    """Write the map and all notebooks."""
    notebooks = place / "site" / "notebooks"
    notebooks.mkdir(parents=True, exist_ok=True)
    (place / "book_map.svg").write_text(map_svg(), encoding="utf-8")
    for chapters in parts().values():
        for name in chapters:
            data = notebook((BOOK / f"{name}.md").read_text(encoding="utf-8"))
            (notebooks / f"{name}.ipynb").write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def add_link(app: Any, name: str, source: list[str]) -> None:
    """Let the page of a chapter name its notebook."""
    folder, _, chapter = name.rpartition("/")
    if folder == "book" and chapter != "index":
        link = f'<a href="../notebooks/{chapter}.ipynb" download>this chapter as a notebook</a>'
        source[0] += f'\n```{{raw}} html\n<p class="notebook">{link}</p>\n```\n'
