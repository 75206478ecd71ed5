"""Change a trained model: keep or transform its weights where possible, and initialize the new ones.

Fewer KV heads, a longer context by YaRN, a sliding window, layers removed or repeated, a larger vocabulary, an untied head:
whatever --set, --swap and --layers can express. With --text the loss is measured on the last twentieth of the file before and
after the change, and --heal trains on the rest. A tensor that cannot be carried over is an error with its path, unless
--redraw.

    dovetail graft llama-tiny-trained --set 'layers.*.mixer.kv_heads=1' --text plays.txt --heal 1
    dovetail graft llama-tiny-trained --layers 0-3,3-5 -o deeper --hf
    dovetail graft llama-tiny-trained --set 'layers.*.mixer.mask=[causal, {kind: window, size: 64, keep: 4}]' -o windowed
"""

from __future__ import annotations

import dataclasses as dc
import os
from pathlib import Path
from typing import Annotated

import tyro

from dovetail.cli.flags import BatchSize, InDir, InFile, Length, LoadFlags, OutDir, Seed, Sets, Swaps
from dovetail.cli.output import print_json, print_note
from dovetail.cli.printing import options, print_view

INTERRUPTED = 130


@dc.dataclass
class Command(LoadFlags):
    """The model, the changes, the training after them, and the output."""

    directory: tyro.conf.Positional[InDir]
    """A model directory, in Dovetail's or Hugging Face's layout."""
    set: Sets = ()
    """Change a field: --set layers.*.mixer.kv_heads=1; may be given many times."""
    swap: Swaps = ()
    """Change a part in every layer: --swap position=alibi; may be given many times, applied before --set."""
    layers: str | None = None
    """The old layers that make up the new model: 0-3,3,5 are six layers, layer 3 twice. --set then counts the new ones."""
    redraw: bool = False
    """Initialize a tensor if no map from the old one is known."""
    text: InFile | None = None
    """A UTF-8 text file: the loss is measured on its last twentieth, --heal trains on the rest."""
    heal: float | None = None
    """Train for N minutes on the text."""
    out: Annotated[OutDir | None, tyro.conf.arg(aliases=["-o"])] = None
    """The model directory to write; DIRECTORY-grafted by default."""
    hf: bool = False
    """Write Hugging Face's layout, in the family of the source or the first family that can express the spec."""
    family: str | None = None
    """With --hf: the family to write, one of those that `dovetail port` lists."""
    force: bool = False
    """Replace an existing model directory."""
    seed: Seed = 0
    """The seed of new weights and of the batches."""
    batch: BatchSize = 8
    """Sequences per step."""
    length: Length = 128
    """Tokens per sequence."""
    learning_rate: float = 1e-3
    """The peak learning rate of --heal; much lower (1e-5) for a large model."""
    json: bool = False
    """Print one JSON object."""

    def run(self) -> int:
        """Graft, evaluate, train, write, print."""
        from dovetail.api.graft import graft
        from dovetail.cli.loading import shown_loading

        out = self.out or Path(os.path.relpath(f"{os.path.abspath(self.directory)}-grafted"))
        with shown_loading(self.directory.name) as watch:
            result = graft(self.directory, **{**options(self, "directory", "json", "load"), "out": out}, watch=watch)
        if self.json:
            print_json(result.to_dict())
        else:
            print_view(result)
        if result.interrupted:
            step = f" after step {result.history[-1].step} of the training" if result.history else ""
            print_note(f"interrupted{step}; the model is in {out}")
        return INTERRUPTED if result.interrupted else 0
