"""The model in a checkpoint, written as a model directory one tensor at a time: the whole model is never in memory.

    checkpoints/step-00000120/rank-*.safetensors  ->  dovetail.yaml, model.safetensors

With a moving average in the checkpoint, its weights are written. A checkpoint of a run that trains an adapter holds the tensors
of the adapter alone, which are written as an adapter directory.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from dovetail.base.errors import FileError
from dovetail.disk.tensors import DTYPES
from dovetail.files.model_dir import LazyTensors, spec_and, write_directory
from dovetail.model.model import Model
from dovetail.spec.fold import Declared, declared
from dovetail.training.checkpoint import CHECKPOINTS, CheckpointManifest, Checkpoints, read_manifest, step_of, verify
from dovetail.training.storage import read_chunks
from dovetail.weights.adapters.kind import AdapterKind
from dovetail.weights.adapters.storage import Base, Stored, write_adapter


def write_model(checkpoint: Path, spec: Model, out: Path, beside: Mapping[str, str | bytes]) -> None:
    """Write the model of a checkpoint, with further files; files of others in the directory are kept."""
    write_directory(out, checkpoint_pieces(checkpoint, spec), spec_and(spec, beside), keep_foreign=True)


def write_trained_adapter(checkpoint: Path, kind: AdapterKind, base: Base, out: Path) -> None:
    """Write the adapter of a checkpoint into a directory, beside what is there."""
    manifest = read_manifest(checkpoint)
    paths = [name.removeprefix("weights.") for name in manifest.tensors if name.startswith("weights.")]
    tensors = {path: tensor for one in paths for path, tensor in _piece(checkpoint, manifest, one).make().items()}
    write_adapter(out, Stored(kind, base, tensors))


def checkpoint_of(run: Path, step: int) -> Path:
    """The checkpoint of a run after a step, whose checksums hold. Raises FileError with the steps that there are."""
    checkpoints = {step_of(path): path for path in Checkpoints(run / CHECKPOINTS).complete()}
    if step not in checkpoints:
        present = f"steps: {', '.join(map(str, checkpoints))}" if checkpoints else "train with -o first"
        raise FileError(f"{run}: holds no checkpoint of step {step}; {present}")
    verify(checkpoints[step])
    return checkpoints[step]


def check_checkpoint(checkpoint: Path, spec: Model) -> None:
    """Raise FileError for the first weight of a spec that a checkpoint does not hold, or holds in another shape."""
    for piece, d in zip(checkpoint_pieces(checkpoint, spec), stored(spec), strict=True):
        shape, wanted = list(piece.layout[d.path].shape), list(d.weight.shape(d.scope))
        if shape != wanted:
            problem = f"{d.path} has the shape {shape}; the spec beside it says {wanted}; was the spec edited?"
            raise FileError(f"{checkpoint}: {problem} Restore it, or carry the weights over with `dovetail graft`")


def stored(spec: Model) -> list[Declared]:
    """The weights of a spec that files hold."""
    return [d for d in declared(spec) if d.weight.stored]


def checkpoint_pieces(checkpoint: Path, spec: Model) -> list[LazyTensors]:
    """Every stored weight of a spec, read from a checkpoint when it is written."""
    manifest = read_manifest(checkpoint)
    return [_piece(checkpoint, manifest, d.path) for d in stored(spec)]


def _piece(checkpoint: Path, manifest: CheckpointManifest, path: str) -> LazyTensors:
    names = [name for name in (f"ema.{path}", f"weights.{path}") if name in manifest.tensors]
    if not names:
        raise FileError(f"{checkpoint}: holds no weights.{path}; was the spec edited?")
    described = manifest.tensors[names[0]]
    layout = torch.empty(described["shape"], dtype=DTYPES[described["dtype"]], device="meta")

    def make() -> dict[str, Tensor]:
        tensor = torch.empty_like(layout, device="cpu")
        read_chunks(checkpoint, {names[0]: described}, {names[0]: tensor})
        return {path: tensor}

    return LazyTensors({path: layout}, make)
