"""Draw the attention maps of a layer: the attention probs of each head, from each token (row) to each other (column).

dovetail map llama-tiny-trained "To be, or not to be, that is the question" -o map.png --layer 3
"""

from __future__ import annotations

import dataclasses as dc
from pathlib import Path
from typing import Annotated

import tyro

from dovetail.cli.flags import InDir, LoadFlags, OutFile
from dovetail.cli.output import print_json, print_line


@dc.dataclass
class Command(LoadFlags):
    """The model, the text, and the picture."""

    model: tyro.conf.Positional[InDir]
    """A model directory with a tokenizer.json: ours, or in Hugging Face layout."""
    text: tyro.conf.Positional[str]
    """The input of the model: a sentence or two."""
    out: Annotated[OutFile, tyro.conf.arg(aliases=["-o"])] = Path("map.png")
    """The picture to write: .png, .svg or .pdf."""
    layer: int | None = None
    """The layer, counted from 0; −1 is the last (default: the middle one)."""
    heads: tuple[int, ...] = ()
    """The heads to draw, counted from 0 (default: all)."""
    json: bool = False
    """Print one JSON object."""

    def run(self) -> int | None:
        """Trace the attention probs of the layer and draw them."""
        import torch

        from dovetail.core.finite import check_weights
        from dovetail.look.map import attention_of, draw_map
        from dovetail.port.load import load
        from dovetail.text.tokenizer import Tokenizer

        model = load(self.model)
        spec = model.part
        check_weights(model, spec)
        tokenizer = Tokenizer.load(self.model)
        tokens = torch.tensor(tokenizer.prompt(self.text), dtype=torch.long)  # with [CLS], <s> … as the model was trained
        layer = len(spec.layers) // 2 if self.layer is None else self.layer
        pattern = attention_of(model, tokens, layer)
        layer %= len(spec.layers)
        title = f"{self.model.name}, layer {layer}: attention from each token (row) to each other (column)"
        labels = [tokenizer.label(int(token)) for token in tokens]
        draw_map(pattern, labels, self.heads or range(len(pattern)), self.out, title)
        if self.json:
            print_json({"file": str(self.out), "layer": layer, "heads": len(pattern), "tokens": len(tokens)})
        else:
            print_line(f"layer {layer} of {len(spec.layers)}, {len(pattern)} heads, {len(tokens)} tokens: {self.out}")
        return 0
