"""Convert a model directory to Hugging Face layout: config.json, and tensors under a family's names.

The family is the one the model was imported from, or the first that can express the spec; where none can, the error names the
part that cannot be written. `dovetail port` lists the families.

    dovetail export llama-tiny-trained -o llama-tiny-hf
    dovetail export small -o small-gptq --layout gptq   # of a model that `dovetail quantize` wrote
    dovetail export run-1 --step 1200 -o run-1-hf       # a checkpoint of a run
    dovetail export mixed -o mixed-vllm --family dovetail   # any spec that vLLM's attention can compute, for our plugin in vLLM
"""

from __future__ import annotations

import dataclasses as dc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from dovetail.api.result import Result
from dovetail.disk.untrusted import Directory
from dovetail.views.blocks import View

if TYPE_CHECKING:
    from dovetail.files.model_dir import LazyTensors
    from dovetail.hf.hf import Ported
    from dovetail.hf.load import Watch
    from dovetail.model.model import Model
from dovetail.api.options import OUT, REPLACE_MODEL, InDir, Steps
from dovetail.base.option import Option


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

    def view(self, width: int) -> View:
        family = f"{self.model_type} ({self.architecture})"
        return f"{self.source}: written to {self.directory} as {family}, {self.tensors} tensors"


def export(
    directory: Annotated[str | Path, InDir("A model directory, or with --step that of a training run.", argument=True)],
    out: Annotated[str | Path, OUT],
    *,
    family: Annotated[
        str | None,
        Option(
            "The model_type to write, one of those that `dovetail port` lists; dovetail: the spec itself, for our plugin in "
            "vLLM."
        ),
    ] = None,
    layout: Annotated[
        Literal["compressed-tensors", "gptq", "awq"],
        Option("How weights of fewer bits are written; gptq and awq hold only int4."),
    ] = "compressed-tensors",
    step: Annotated[
        int | None, Steps("Export the checkpoint of a training run after this step, which may still be running.")
    ] = None,
    force: Annotated[bool, REPLACE_MODEL] = False,
    watch: Watch | None = None,
) -> Exported:
    """Write the model of a directory in Hugging Face layout: config.json, and tensors under a family's names.

    `family` is a model_type of `list_families`: by default the one that the model was imported from, or the first that can
    express the spec. Where none can, SpecError names the part that cannot be written.

    The family `dovetail` writes a config.json with the spec inside, which vLLM opens with our plugin: for specs that no family
    can express. SpecError names the part that vLLM cannot serve.

    `layout` is how weights of fewer bits are written: compressed-tensors, gptq or awq. Where it cannot hold a matrix, SpecError
    names it.

    `step` exports a checkpoint of a training run, which may still be running, instead of the weights in the directory: its
    checksums are verified, and its tensors are read one at a time. With a moving average its weights are written.
    """
    from dovetail.files.model_dir import must_be_free
    from dovetail.hf.own_config import MODEL_TYPE
    from dovetail.hf.write import export_directory

    must_be_free(Path(out), force)
    if family == MODEL_TYPE:
        return _export_own(Path(directory), Path(out), step, watch)
    if step is None:
        ported = export_directory(directory, out, family, layout=layout, watch=watch)
    else:
        ported = _export_step(Path(directory), step, Path(out), family)
    names = sum(len(move.hf_names) for move in ported.moves)
    return Exported(Path(directory), Path(out), ported.dialect, ported.form.architecture, names)


def _export_own(directory: Path, out: Path, step: int | None, watch: Watch | None) -> Exported:
    from dovetail.hf.load import load
    from dovetail.hf.origin import origin
    from dovetail.hf.own_config import MODEL_TYPE, architecture, write_own_config
    from dovetail.hf.write import files_beside, imported_config, model_pieces
    from dovetail.serving.can_serve import require

    where = Directory(directory)
    spec = origin(where).spec
    require(spec, "vllm")  # before the weights are read
    weights = model_pieces(load(directory, watch=watch)) if step is None else _step_pieces(directory, step, spec)
    tensors = write_own_config(spec, weights, out, files_beside(where), imported_config(where))
    return Exported(directory, out, MODEL_TYPE, architecture(spec), tensors)


def _export_step(run: Path, step: int, out: Path, family: str | None) -> Ported:
    from dovetail.hf.origin import origin
    from dovetail.hf.write import write_theirs

    where = Directory(run)
    spec = origin(where).spec
    return write_theirs(spec, _step_pieces(run, step, spec), where, out, family)


def _step_pieces(run: Path, step: int, spec: Model) -> list[LazyTensors]:
    from dovetail.training.export import checkpoint_of, checkpoint_pieces  # imports torch.distributed

    return checkpoint_pieces(checkpoint_of(run, step), spec)
