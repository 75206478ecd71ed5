"""Draw the pictures of the book: `python docs/book/draw.py [NAME …]` computes the data of chapters anew and draws them.

Each chapter has a script pictures/NAME.py with `data()`, which returns plain data, and `draw(figure, data)`. The data is stored
beside it as NAME.json, and a test computes it again: a picture shows what the library computes today.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

from dovetail.views.figure import new_figure, quiet, write_figure

BOOK = Path(__file__).parent
SIZE = (8.0, 3.2)  # inches


def script(name: str) -> dict[str, Any]:
    """What the script of a chapter's picture defines."""
    return runpy.run_path(str(BOOK / "pictures" / f"{name}.py"))


def computed(name: str) -> Any:
    """The data of a chapter's picture, computed now, with five digits."""
    return json.loads(json.dumps(script(name)["data"]()), parse_float=lambda text: float(f"{float(text):.5g}"))


def main(names: list[str]) -> None:
    """Compute the data of these chapters, or of all, and draw them."""
    for name in names or sorted(path.stem for path in (BOOK / "pictures").glob("*.py")):
        data = computed(name)
        (BOOK / "pictures" / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        figure = new_figure(*script(name).get("SIZE", SIZE))
        script(name)["draw"](figure, data)
        for axes in figure.axes:
            quiet(axes)
        write_figure(figure, BOOK / "pictures" / f"{name}.svg")
        sys.stdout.write(f"{name}.svg\n")


if __name__ == "__main__":
    main(sys.argv[1:])
