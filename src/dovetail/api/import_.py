"""Convert a model directory from Hugging Face layout to ours: the spec as dovetail.yaml, tensors under our names.

No code in the directory is executed. Every weight is kept bit for bit, except tensors that are reported as dropped; tokenizer,
generation settings and license are copied. `show`, `generate` and `dovetail.load` read Hugging Face layout without conversion.

    dovetail import Meta-Llama-3-8B -o llama
    dovetail show llama
"""

from __future__ import annotations

import dataclasses as dc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from dovetail.api.result import Result
from dovetail.spec.fold import parameters
from dovetail.views.blocks import View

if TYPE_CHECKING:
    from dovetail.hf.load import Watch
    from dovetail.hf.tensors import Dropped
from dovetail.api.options import OUT, REPLACE_MODEL, InDir


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

    def view(self, width: int) -> View:
        first = f"{self.source}: {self.parameters:,} parameters in {self.layers} layers, written to {self.directory}"
        return "\n".join([first, *(f"  {one}" for one in self.dropped)])


def import_(
    directory: Annotated[
        str | Path, InDir("A directory with config.json and model.safetensors (or several files with an index).", argument=True)
    ],
    out: Annotated[str | Path, OUT],
    *,
    force: Annotated[bool, REPLACE_MODEL] = False,
    watch: Watch | None = None,
) -> Imported:
    """Write the model of a directory in Hugging Face layout as one of ours: dovetail.yaml, and tensors under our names.

    Every weight is kept bit for bit, except tensors that are reported as dropped. No code in the directory is executed.
    `watch` is called with (bytes read, bytes in all).
    """
    from dovetail.files.model_dir import must_be_free
    from dovetail.hf.write import import_directory

    must_be_free(Path(out), force)
    spec, dropped = import_directory(directory, out, watch=watch)
    return Imported(Path(directory), Path(out), parameters(spec), len(spec.layers), tuple(dropped))
