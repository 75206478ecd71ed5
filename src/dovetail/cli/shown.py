"""What a verb shows people: on the terminal, as wide as that is, and as a page where one is asked for."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from io import StringIO
from pathlib import Path

from rich.color import parse_rgb_hex
from rich.console import RenderableType
from rich.terminal_theme import TerminalTheme

from dovetail.cli.output import SafeConsole
from dovetail.io.atomic import write_atomically

WIDE = 150  # columns where there is no terminal to ask, and of a page
PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>%s</title><style>
{stylesheet}
body{{margin:2rem;color:{foreground};background:{background}}}
pre{{font:13px/1.5 ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace;overflow-x:auto}}
</style><pre>{code}</pre></html>
"""
# black, red, green, yellow, blue, magenta, cyan, white: dark enough to be read on paper
COLOURS = [parse_rgb_hex(color) for color in ["1a1d21", "c7362b", "247844", "9a7000", "2658b2", "8e3a8c", "0a7082", "5a6068"]]
PAPER = TerminalTheme(parse_rgb_hex("ffffff"), COLOURS[0], COLOURS)  # type: ignore[arg-type]


def shown(view: Callable[[int], RenderableType]) -> None:
    """Print a view at the width of the terminal."""
    console = SafeConsole()
    if not console.is_terminal:
        console = SafeConsole(width=WIDE)
    console.print(view(console.width), highlight=False)


def write_page(path: Path, title: str, view: Callable[[int], RenderableType]) -> None:
    """The same view as one HTML page that needs nothing beside it."""
    console = SafeConsole(record=True, width=WIDE, file=StringIO(), force_terminal=True, color_system="truecolor")
    console.print(view(WIDE), highlight=False)
    named = PAGE % escape(title).replace("{", "&#123;").replace("}", "&#125;")  # a brace would be a place to fill
    write_text(path, console.export_html(theme=PAPER, code_format=named))


def write_text(path: Path, text: str) -> None:
    """A file that people asked for by name."""
    write_atomically(path, text)
