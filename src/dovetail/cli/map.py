"""Draw the attention maps of a layer: the attention probs of each head, from each token (row) to each other (column).

dovetail map llama-tiny-trained "To be, or not to be, that is the question" -o map.png --layer 3
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from dovetail.api.options import OutFile
from dovetail.cli.command import Options, call
from dovetail.cli.printing import print_result

Picture = Annotated[Path, OutFile("The picture to write: .png, .svg or .pdf.", short="-o")]


def run(given: Options, json: bool, out: Picture = Path("map.png")) -> int:
    """Trace the attention probs of the layer and draw them."""
    from dovetail.api.map import map

    return print_result(call(map, {**given, "out": out}), json)
