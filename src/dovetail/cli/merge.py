"""Merge adapters into the weights of a model.

Several adapters are combined: linear adds what they change, ties keeps the largest changes that agree in sign, dare keeps a
random fraction of each. An adapter that was trained on another base is refused.

    dovetail merge base my-adapter -o merged
    dovetail merge base french code --method ties --weights 1 0.5 -o both --hf
    dovetail merge my-adapter
"""

from __future__ import annotations

import dataclasses as dc
import os
from pathlib import Path
from typing import Annotated, Literal

import tyro

from dovetail.cli.flags import InDir, LoadFlags, OutDir, Seed
from dovetail.cli.output import print_json
from dovetail.cli.printing import options, print_view


@dc.dataclass
class Command(LoadFlags):
    """The model, the adapters, and the output."""

    directory: tyro.conf.Positional[InDir]
    """A model directory, in Dovetail's or Hugging Face's layout; or an adapter directory, to merge into the base it names."""
    adapters: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="ADAPTER")] = ()
    """Adapter directories, of Dovetail or of peft."""
    out: Annotated[OutDir | None, tyro.conf.arg(aliases=["-o"])] = None
    """The model directory to write; DIRECTORY-merged by default."""
    method: Literal["linear", "ties", "dare"] = "linear"
    """How several adapters are combined."""
    weights: tuple[float, ...] = ()
    """A factor for each adapter (default: 1)."""
    density: float = 0.5
    """With ties and dare: the fraction of each adapter's changes that is kept."""
    any_base: bool = False
    """Also merge an adapter that was trained on another base."""
    hf: bool = False
    """Write Hugging Face's layout."""
    force: bool = False
    """Replace an existing model directory."""
    seed: Seed = 0
    """The seed of dare."""
    json: bool = False
    """Print one JSON object."""

    def run(self) -> int:
        """Merge, write, print."""
        from dovetail.api.merge import merge
        from dovetail.cli.loading import shown_loading

        out = self.out or Path(os.path.relpath(f"{os.path.abspath(self.directory)}-merged"))
        given = {**options(self, "directory", "adapters", "json", "load"), "out": out}
        with shown_loading(self.directory.name) as watch:
            result = merge(self.directory, *self.adapters, **given, watch=watch)
        if self.json:
            print_json(result.to_dict())
        else:
            print_view(result)
        return 0
