"""The site: these pages, and a reference that is written from the registry, the commands and the families at every build.

python -m sphinx -W -b html docs docs/_build/html
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from book_extras import add_link, write_extras
from reference import write_reference
from sphinx.application import Sphinx

from dovetail import __version__
from dovetail.views.page import TEMPLATES

project = "Dovetail"
author = "the Dovetail authors"
copyright = "the Dovetail authors, Apache-2.0"
release = version = __version__

extensions = ["myst_parser", "sphinx_copybutton", "mathml"]
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath", "html_image"]
myst_heading_anchors = 3
exclude_patterns = ["_build", "figures"]
suppress_warnings = ["misc.highlighting_failure"]  # a tree drawn with lines is no program
copybutton_exclude = ".linenos, .gp"
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True

html_math_renderer = "mathml"
html_theme = "furo"
html_title = "Dovetail"
html_extra_path = ["reference/site"]
html_static_path = ["_static", str(TEMPLATES / "page.css")]
html_css_files = ["page.css", "site.css"]

# the site has the colors of the pages that commands write: what furo calls each color of page.css
COLORS = {
    "page": ["background-primary"],
    "card": ["background-secondary"],
    "ink": ["foreground-primary"],
    "soft": ["foreground-secondary"],
    "accent": ["brand-primary", "brand-content", "brand-visited"],
}


def colors(block: str) -> dict[str, str]:
    """The variables of the theme, from a block of variables of page.css."""
    own = dict(re.findall(r"--(\w+):(#\w+)", block))
    return {f"color-{theirs}": own[ours] for ours, names in COLORS.items() for theirs in names}


LIGHT, DARK = re.findall(r"\.dovetail\{(\s*--.*?)\}", (TEMPLATES / "page.css").read_text(encoding="utf-8"), re.DOTALL)
html_theme_options = {"light_css_variables": colors(LIGHT), "dark_css_variables": colors(DARK)}

write_reference(Path(__file__).parent / "reference")
write_extras(Path(__file__).parent / "reference")


def setup(app: Sphinx) -> None:
    """Name its notebook on the page of each chapter."""
    app.connect("source-read", add_link)
