"""The shell of every HTML page (`show`, `diff`, `verify`): one style sheet, light and dark, from 360 pixels of width on.

A page is one file: no script, no font, no picture is fetched. Every name is escaped by `text`. The style sheet applies within
`.dovetail` only, so that a fragment in a notebook does not restyle the notebook. Contrast of text is at least 4.5
(tests/views/test_page.py computes it from the colors below).
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import NamedTuple

from dovetail.core.printable import LINES, printable

# name -> (light, dark)
COLORS = {
    "page": ("#ffffff", "#14171a"),
    "ink": ("#1a1d21", "#e8eaed"),
    "soft": ("#4a525d", "#b4bcc6"),  # labels and notes
    "card": ("#f4f6fa", "#1e2329"),
    "inner": ("#ffffff", "#14171a"),  # a card within a card
    "line": ("#8a94a3", "#6b7684"),
    "accent": ("#2456a6", "#8ab4f8"),
    "first": ("#fdecea", "#43201d"),  # the row at which two implementations diverge
    "changed": ("#fff4d6", "#3a2f10"),  # a part that differs
}
BADGE = "#ffffff"  # text on a badge, in light and dark
BADGES = {
    "kept": "#1f7a3f",
    "equal": "#1f7a3f",
    "reinterpreted": "#7d5800",
    "rounding": "#7d5800",
    "sampling": "#7d5800",
    "stale": "#7d5800",
    "changed": "#7d5800",
    "transformed": "#0a6676",
    "new": "#2456a6",
    "dropped": "#8e3a8c",
    "impossible": "#b3261e",
    "structural": "#b3261e",
    "non-finite": "#b3261e",
}
RULES = """
.dovetail{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--page);overflow-wrap:anywhere}
.dovetail *{box-sizing:border-box}
.dovetail h1{font-size:1.35rem;line-height:1.3;margin:.2rem 0 .8rem;color:var(--ink)}
.dovetail h2{font-size:1.05rem;margin:1.6rem 0 .5rem;color:var(--ink)}
.dovetail p{margin:.4rem 0}
.dovetail .soft{color:var(--soft)}
.dovetail code{font:.92em ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace;background:var(--card);color:var(--ink);
padding:0 .25rem;border-radius:3px}
.dovetail .badge{display:inline-block;color:#ffffff;padding:0 .5rem;border-radius:4px;font-size:.9rem;white-space:nowrap}
.dovetail .facts{display:grid;grid-template-columns:repeat(auto-fill,minmax(9.5rem,1fr));gap:.5rem;margin:.8rem 0}
.dovetail .facts div{background:var(--card);border-radius:6px;padding:.4rem .6rem}
.dovetail .facts dt{color:var(--soft);font-size:.85rem;font-weight:400}
.dovetail .facts dd{margin:0;font-weight:600;font-variant-numeric:tabular-nums}
.dovetail .facts small{display:block;color:var(--soft);font-weight:400;font-size:.8rem}
.dovetail table{border-collapse:collapse;max-width:100%;background:none;color:var(--ink);font-size:.9rem}
.dovetail td,.dovetail th{padding:.15rem .8rem .15rem 0;text-align:left;vertical-align:top;background:none;border:0}
.dovetail th{color:var(--soft);font-weight:500}
.dovetail td.n,.dovetail th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.dovetail details>summary{cursor:pointer;list-style:none}
.dovetail details>summary::-webkit-details-marker{display:none}
.dovetail details>summary:focus-visible{outline:2px solid var(--accent);outline-offset:2px}
.dovetail details>summary::before{content:"▸";color:var(--soft);display:inline-block;width:1.1em;flex:none}
.dovetail details[open]>summary::before{content:"▾"}
.dovetail .wide{overflow-x:auto}
"""
SHELL = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<meta name="color-scheme" content="light dark"><title>{title}</title>
<style>{style}
html{{background:{light}}}body{{margin:0}}.dovetail{{max-width:68rem;margin:0 auto;padding:1rem}}
@media(prefers-color-scheme:dark){{html{{background:{dark}}}}}
</style></head><body><main class="dovetail">{body}</main></body></html>
"""


class Fact(NamedTuple):
    """A figure at the top of a page: its name, its value and a note below it."""

    name: str
    value: str
    note: str = ""


class Page(NamedTuple):
    """The content of a page: its title, its body as HTML, and the style rules of the body's own elements."""

    title: str
    body: str
    rules: str = ""

    def whole(self) -> str:
        """Return one self-contained HTML page."""
        light, dark = COLORS["page"]
        return SHELL.format(title=text(self.title), style=style(self.rules), body=self.body, light=light, dark=dark)

    def fragment(self) -> str:
        """Return the same content for a notebook."""
        return f'<div class="dovetail" style="padding:1rem"><style>{style(self.rules)}</style>{self.body}</div>'


def style(rules: str = "") -> str:
    """Return the style sheet: the colors, the common rules and the `rules` of one page."""
    light, dark = (";".join(f"--{name}:{pair[i]}" for name, pair in COLORS.items()) for i in range(2))
    badges = "".join(f".dovetail .badge.{name},.dovetail .bar.{name}{{background:{color}}}\n" for name, color in BADGES.items())
    scheme = f".dovetail{{{light}}}\n@media(prefers-color-scheme:dark){{.dovetail{{{dark}}}}}\n"
    return scheme + RULES.strip() + "\n" + badges + rules.strip()


def text(value: object) -> str:
    """Escape a string for HTML; control characters become visible."""
    return escape(printable(str(value), None, LINES))


def badge(status: str, words: str = "") -> str:
    """Return a colored label."""
    return f'<span class="badge {text(status)}">{text(words or status)}</span>'


def facts(items: Iterable[Fact]) -> str:
    """Return figures as a grid of cards."""
    cards = (
        f"<div><dt>{text(name)}</dt><dd>{text(value)}{f'<small>{text(note)}</small>' if note else ''}</dd></div>"
        for name, value, note in items
    )
    return f'<dl class="facts">{"".join(cards)}</dl>'
