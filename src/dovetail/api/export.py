"""export: convert a model directory to Hugging Face layout."""

from __future__ import annotations

import dataclasses as dc
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from dovetail.api.result import Result
from dovetail.io.model_dir import must_be_free
from dovetail.look.console import unwrapped
from dovetail.port.load import Watch
from dovetail.port.write import export_directory


@dc.dataclass(frozen=True, repr=False)
class Exported(Result):
    """The directory that was written, and the family as which it was written."""

    source: Path
    directory: Path
    model_type: str
    architecture: str
    tensors: int

    def to_dict(self) -> dict[str, Any]:
        data = {"directory": str(self.directory), "model_type": self.model_type}
        return {**data, "architecture": self.architecture, "tensors": self.tensors}

    def view(self, width: int) -> RenderableType:
        family = f"{self.model_type} ({self.architecture})"
        return unwrapped(f"{self.source}: written to {self.directory} as {family}, {self.tensors} tensors")


def export(
    directory: str | Path, out: str | Path, *, family: str | None = None, force: bool = False, watch: Watch | None = None
) -> Exported:
    """Write the model of a directory in Hugging Face layout: config.json, and tensors under a family's names.

    `family` is a model_type of `list_families`: by default the one that the model was imported from, or the first that can
    express the spec. Where none can, SpecError names the part that cannot be written.
    """
    must_be_free(Path(out), force)
    ported = export_directory(directory, out, family, watch=watch)
    names = sum(len(move.hf_names) for move in ported.moves)
    return Exported(Path(directory), Path(out), ported.dialect, ported.form.architecture, names)
