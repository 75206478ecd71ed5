"""Draw the attention maps of a layer: the attention probs of each head, from each token (row) to each other (column).

dovetail map llama-tiny-trained "To be, or not to be, that is the question" -o map.png --layer 3
"""

from __future__ import annotations

import dataclasses as dc
from pathlib import Path
from typing import Annotated

import tyro

from dovetail.cli.flags import FileFlags, InDir, OutFile
from dovetail.cli.output import print_json
from dovetail.cli.printing import options, print_view


@dc.dataclass
class Command(FileFlags):
    """The model, the text, and the picture."""

    model: tyro.conf.Positional[InDir]
    """A model directory with a tokenizer.json: ours, or in Hugging Face layout."""
    text: tyro.conf.Positional[str]
    """The input of the model: a sentence or two; the source of an encoder–decoder, whose cross attention is drawn."""
    target: str | None = None
    """What the decoder of an encoder–decoder reads (default: what it generates)."""
    out: Annotated[OutFile, tyro.conf.arg(aliases=["-o"])] = Path("map.png")
    """The picture to write: .png, .svg or .pdf."""
    layer: int | None = None
    """The layer, counted from 0; −1 is the last (default: the middle one)."""
    heads: tuple[int, ...] = ()
    """The heads to draw, counted from 0 (default: all)."""
    json: bool = False
    """Print one JSON object, with the attention probs."""

    def run(self) -> int:
        """Trace the attention probs of the layer and draw them."""
        from dovetail.api.map import map
        from dovetail.cli.loading import shown_loading

        with shown_loading(self.model.name) as watch:
            result = map(**options(self, "json", "load"), watch=watch)
        if self.json:
            print_json(result.to_dict())
        else:
            print_view(result)
        return 0
