"""The site: these pages, and a reference that is written from the registry, the commands and the families at every build.

python -m sphinx -W -b html docs docs/_build/html
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from reference import write_reference

from dovetail import __version__

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
html_static_path = ["_static"]
html_css_files = ["site.css"]

write_reference(Path(__file__).parent / "reference")
