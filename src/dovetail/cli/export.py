"""Write a model directory in Hugging Face layout: config.json, and tensors under a family's names.

The family is the one the model was imported from, or the first that can express the spec; where none can, the error names the
part that cannot be written. `dovetail port` lists the families.

    dovetail export llama-tiny-trained -o llama-tiny-hf
"""

from __future__ import annotations

import dataclasses as dc
from typing import Annotated

import tyro

from dovetail.cli.flags import InDir, LoadFlags, OutDir
from dovetail.cli.output import print_json, print_line


@dc.dataclass
class Command(LoadFlags):
    """Which model, as which family, and where to."""

    directory: tyro.conf.Positional[InDir]
    """A model directory."""
    out: Annotated[OutDir, tyro.conf.arg(aliases=["-o"])]
    """The directory to write."""
    family: str | None = None
    """The model_type to write, as `dovetail port` lists them."""
    force: bool = False
    """Replace the directory where it is a model already."""
    json: bool = False
    """One JSON object on stdout."""

    def run(self) -> int | None:
        """Load the model, write it, and report the family."""
        from dovetail.cli.loading import shown_loading
        from dovetail.io.model_dir import must_be_free
        from dovetail.port.write import export_directory

        must_be_free(self.out, self.force)
        with shown_loading(self.directory.name) as watch:
            ported = export_directory(self.directory, self.out, self.family, watch=watch)
        names = sum(len(move.hf_names) for move in ported.moves)
        architecture = ported.form.architecture
        if self.json:
            report = {"directory": str(self.out), "model_type": ported.dialect, "architecture": architecture, "tensors": names}
            print_json(report)
        else:
            print_line(f"{self.directory}: written to {self.out} as {ported.dialect} ({architecture}), {names} tensors")
        return 0
