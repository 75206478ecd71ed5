"""Convert a model directory from Hugging Face layout to ours: the spec as dovetail.yaml, tensors under our names.

No code in the directory is executed. Every weight is kept bit for bit, except tensors that are reported as dropped; tokenizer,
generation settings and license are copied. `show`, `generate` and `dovetail.load` read Hugging Face layout without conversion.

    dovetail import Meta-Llama-3-8B -o llama
    dovetail show llama
"""

from __future__ import annotations

import dataclasses as dc
from typing import Annotated

import tyro

from dovetail.cli.flags import InDir, LoadFlags, OutDir
from dovetail.cli.output import print_json
from dovetail.cli.printing import options, print_view


@dc.dataclass
class Command(LoadFlags):
    """The two directories."""

    directory: tyro.conf.Positional[InDir]
    """A directory with config.json and model.safetensors (or several files with an index)."""
    out: Annotated[OutDir, tyro.conf.arg(aliases=["-o"])]
    """The directory to write."""
    force: bool = False
    """Replace an existing model directory."""
    json: bool = False
    """Print one JSON object."""

    def run(self) -> int:
        """Convert, and print the size and the dropped tensors."""
        from dovetail.api.import_ import import_
        from dovetail.cli.loading import shown_loading

        with shown_loading(self.directory.name) as watch:
            result = import_(**options(self, "json", "load"), watch=watch)
        if self.json:
            print_json(result.to_dict())
        else:
            print_view(result)
        return 0
