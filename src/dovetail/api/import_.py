"""import_: convert a model directory from Hugging Face layout to ours."""

from __future__ import annotations

import dataclasses as dc
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from dovetail.api.result import Result
from dovetail.core.fold import parameters
from dovetail.files.model_dir import must_be_free
from dovetail.hf.load import Watch
from dovetail.hf.tensors import Dropped
from dovetail.hf.write import import_directory
from dovetail.views.console import unwrapped


@dc.dataclass(frozen=True, repr=False)
class Imported(Result):
    """The directory that was written, its size, and the tensors of the checkpoint that were not imported."""

    source: Path
    directory: Path
    parameters: int
    layers: int
    dropped: tuple[Dropped, ...]

    def to_dict(self) -> dict[str, Any]:
        data = {"directory": str(self.directory), "parameters": self.parameters, "layers": self.layers}
        return {**data, "dropped": [dc.asdict(one) for one in self.dropped]}

    def view(self, width: int) -> RenderableType:
        first = f"{self.source}: {self.parameters:,} parameters in {self.layers} layers, written to {self.directory}"
        return unwrapped("\n".join([first, *(f"  {one}" for one in self.dropped)]))


def import_(directory: str | Path, out: str | Path, *, force: bool = False, watch: Watch | None = None) -> Imported:
    """Write the model of a directory in Hugging Face layout as one of ours: dovetail.yaml, and tensors under our names.

    Every weight is kept bit for bit, except tensors that are reported as dropped. No code in the directory is executed.
    `watch` is called with (bytes read, bytes in all).
    """
    must_be_free(Path(out), force)
    spec, dropped = import_directory(directory, out, watch=watch)
    return Imported(Path(directory), Path(out), parameters(spec), len(spec.layers), tuple(dropped))
