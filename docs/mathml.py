"""A Sphinx renderer that writes equations as MathML, which browsers draw by themselves: no script, no other host."""

from __future__ import annotations

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the renderer."""
    app.add_html_math_renderer("mathml", (inline, None), (block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def inline(self: HTML5Translator, node: nodes.math) -> None:
    """An equation within a sentence."""
    self.body.append(convert(node.astext()))
    raise nodes.SkipNode


def block(self: HTML5Translator, node: nodes.math_block) -> None:
    """An equation on lines of its own; `\\\\` begins another line. A line that is wider than the page scrolls."""
    lines = "".join(convert(line.strip(), display="block") for line in node.astext().split(r"\\") if line.strip())
    self.body.append(f'<div class="equation">{lines}</div>\n')
    raise nodes.SkipNode
