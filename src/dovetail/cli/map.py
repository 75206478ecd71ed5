"""Draw what the heads of a layer look at in a text.

dovetail map llama-tiny-trained "To be, or not to be, that is the question" -o map.png --layer 3
"""

from __future__ import annotations

import dataclasses as dc
from pathlib import Path
from typing import Annotated

import tyro

from dovetail.cli.output import print_line


@dc.dataclass
class Command:
    """Which model, which text, where to."""

    model: tyro.conf.Positional[Path]
    """A model directory with a tokenizer, as `dovetail train` writes it."""
    text: tyro.conf.Positional[str]
    """What the model reads: a sentence or two."""
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("map.png")
    """The picture to write: .png, .svg or .pdf."""
    layer: int | None = None
    """Layers count from 0, and −1 is the last; the middle one by default."""
    heads: tuple[int, ...] = ()
    """The heads to draw, from 0; all by default."""

    def run(self) -> int | None:
        """Trace the layer's pattern and draw it."""
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
        title = f"{self.model.name}, layer {layer}: what each token (row) looks at (column)"
        labels = [tokenizer.label(int(token)) for token in tokens]
        draw_map(pattern, labels, self.heads or range(len(pattern)), self.out, title)
        print_line(f"layer {layer} of {len(spec.layers)}, {len(pattern)} heads, {len(tokens)} tokens: {self.out}")
        return 0
