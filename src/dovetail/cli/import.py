"""Turn a model directory in Hugging Face layout into one of ours: its spec as dovetail.yaml, its tensors under our names.

No code in the directory is executed. Every weight is kept bit for bit, except tensors that are reported as dropped; tokenizer,
generation settings and license are copied.
(`show`, `generate` and `dovetail.load` read a directory in Hugging Face layout as it is: this is for changing the spec.)

    dovetail import Meta-Llama-3-8B -o llama
    dovetail show llama
"""

from __future__ import annotations

import dataclasses as dc
from typing import Annotated

import tyro

from dovetail.cli.flags import InDir, LoadFlags, OutDir
from dovetail.cli.output import print_json, print_line


@dc.dataclass
class Command(LoadFlags):
    """Which directory, and where to."""

    directory: tyro.conf.Positional[InDir]
    """A directory with config.json and model.safetensors (or several files with an index)."""
    out: Annotated[OutDir, tyro.conf.arg(aliases=["-o"])]
    """The directory to write."""
    force: bool = False
    """Replace it where it is a model already."""
    json: bool = False
    """One JSON object on stdout."""

    def run(self) -> int | None:
        """Load the model, write it, and report its size and the dropped tensors."""
        from dovetail.cli.loading import shown_loading
        from dovetail.core.fold import parameters
        from dovetail.io.model_dir import must_be_free
        from dovetail.port.write import import_directory

        must_be_free(self.out, self.force)
        with shown_loading(self.directory.name) as watch:
            spec, dropped = import_directory(self.directory, self.out, watch=watch)
        count = parameters(spec)
        if self.json:
            report = {"directory": str(self.out), "parameters": count, "layers": len(spec.layers)}
            print_json({**report, "dropped": [dc.asdict(one) for one in dropped]})
        else:
            print_line(f"{self.directory}: {count:,} parameters in {len(spec.layers)} layers, written to {self.out}")
            for one in dropped:
                print_line(f"  {one}")
        return 0
