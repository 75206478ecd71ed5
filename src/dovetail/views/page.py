"""Pages: a jinja2 template each (templates/), one style sheet, no script but that of maps, and nothing is fetched.

    content = body("show.html", name=…)
    Page("title", content).whole()         one file
    Page("title", content).fragment()      the same content for a notebook

Templates escape every value, and control characters in a value become visible.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dovetail.base.errors import LINES, printable

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES = Path(__file__).with_name("templates")
COMMENT = re.compile(r"/\*.*?\*/\s*", re.DOTALL)


class Fact(NamedTuple):
    """A figure at the top of a page: its name, its value, a note below it, and the figures that it is made of."""

    name: str
    value: str
    note: str = ""
    parts: tuple[tuple[str, str], ...] = ()  # (value, what it is)

    def with_part(self, value: str, what: str) -> Fact:
        """Return the figure with one more part."""
        return self._replace(parts=(*self.parts, (value, what)))


class Page(NamedTuple):
    """The title of a page and its content, the result of `body`; another string would be escaped."""

    title: str
    content: str

    def whole(self) -> str:
        """Return one self-contained HTML page."""
        return str(body("page.html", title=self.title, body=self.content))

    def fragment(self) -> str:
        """Return the same content for a notebook."""
        return str(body("fragment.html", body=self.content))


def body(template: str, **values: Any) -> str:
    """Return the content of a page, from the values of its template; a template that it is a value of takes it as HTML."""
    from markupsafe import Markup

    return Markup(_templates().get_template(template).render(values))


@cache
def _templates() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    def visible(value: object) -> object:
        return value if isinstance(value, Markup) else printable(str(value), None, LINES)

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        finalize=visible,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["css"] = Markup(COMMENT.sub("", (TEMPLATES / "page.css").read_text(encoding="utf-8")).strip())
    return environment
