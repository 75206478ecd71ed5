"""Result: the base of what the public functions return.

print(result)         the table that the command line prints
result.to_dict()      plain data
result                as HTML in a notebook, where the result has a page
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from rich.console import RenderableType

from dovetail.views.console import render_text, terminal_width
from dovetail.views.page import Page

INTERRUPTED = 130  # the exit code after Ctrl-C, as of a process that SIGINT ends


class Result(ABC):
    """A result that prints as text and converts to plain data."""

    @property
    def exit_code(self) -> int:
        """The exit code of a command that prints it: 1 where the answer is no."""
        return 0

    @property
    def remark(self) -> str:
        """A line for people, on stderr."""
        return ""

    def for_json(self) -> Any:
        """Return what `--json` prints."""
        return self.to_dict()

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return plain data, as `--json` prints it."""

    @abstractmethod
    def view(self, width: int) -> RenderableType:
        """Return what a terminal of `width` columns shows."""

    def __str__(self) -> str:
        width = terminal_width()
        return render_text(self.view(width), width)

    def __repr__(self) -> str:
        return str(self)


class PageResult(Result):
    """A result that is also an HTML page."""

    @abstractmethod
    def page(self) -> Page:
        """Return the title and the content of the page, escaped."""

    def to_html(self) -> str:
        """Return one self-contained HTML page."""
        return self.page().whole()

    def _repr_html_(self) -> str:
        return self.page().fragment()
