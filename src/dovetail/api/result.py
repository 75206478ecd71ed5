"""Result: the base of what the public functions return.

print(result)         the table that the command line prints
result.to_dict()      plain data
result.to_html()      one page; in a notebook a result is shown as HTML
"""

from __future__ import annotations

import dataclasses as dc
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

from dovetail.views.blocks import PAGE_WIDTH, View, result_page, result_text
from dovetail.views.page import Page

T = TypeVar("T")
INTERRUPTED = 130  # the exit code after Ctrl-C, as of a process that SIGINT ends


class Result(ABC):
    """A result that prints as text and converts to plain data."""

    @property
    def failed(self) -> bool:
        """Whether the answer is no: a law fails, two sides differ, nothing fits."""
        return False

    @property
    def exit_code(self) -> int:
        """The exit code of a command that prints it: 1 where the answer is no."""
        return int(self.failed)

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
    def view(self, width: int) -> View:
        """Return what a terminal of `width` columns shows."""

    def rest(self, width: int) -> View:
        """Return what a terminal shows at the end, after the events of the result were printed."""
        return self.view(width)

    def page(self) -> Page:
        """Return the title and the content of the page, escaped."""
        return result_page(type(self).__name__, self.view(PAGE_WIDTH))

    def to_html(self) -> str:
        """Return one self-contained HTML page."""
        return self.page().whole()

    def _repr_html_(self) -> str:
        return self.page().fragment()

    def __str__(self) -> str:
        return result_text(self.view)

    def __repr__(self) -> str:
        return str(self)


class ListResult(Result, Sequence[T]):
    """A result that is a sequence: of `items`, which are its first field."""

    @property
    def items(self) -> tuple[T, ...]:
        """The items."""
        return next(iter(vars(self).values()))

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...
    def __getitem__(self, index: int | slice) -> T | tuple[T, ...]:
        return self.items[index]

    def __len__(self) -> int:
        return len(self.items)

    def for_json(self) -> Any:
        (data,) = self.to_dict().values()
        return data


@dc.dataclass(frozen=True, repr=False)
class Event(Result):
    """One of the results of a long call, as soon as it is known: `kind` is law, spec, pass, prompt, layout or run."""

    kind: str
    data: dict[str, Any]
    shown: View  # on a terminal

    def to_dict(self) -> dict[str, Any]:
        return {"event": self.kind, **self.data}

    def view(self, width: int) -> View:
        return self.shown


Watch = Callable[[Event], None]


def unwatched(event: Event) -> None:
    """Watch nothing: the default of `watch`."""
