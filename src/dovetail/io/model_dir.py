"""Writing a model directory, whole or not at all.

    DIR/dovetail.yaml        the spec
    DIR/model.safetensors    every stored weight under its path, once; tied weights and constants follow from the spec
    DIR/…                    whatever stands beside them (a tokenizer, a record of losses)

A directory is written whole as `DIR.tmp`, forced to disk and renamed, so no reader ever finds half a model. An older directory
steps aside as `DIR.old`, hands over the files that were not written anew, and goes. Weights beyond SHARD bytes are cut into
several files with an index, `model.safetensors.index.json`. Reading is in port/load.py, for directories of every kind.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor, nn

from dovetail.core.errors import FileError
from dovetail.core.finite import nonfinite
from dovetail.core.fold import declared
from dovetail.core.module import tensor_at
from dovetail.io.spec import SPEC_FILE, to_yaml
from dovetail.io.tensors import write_tensors
from dovetail.model import Model

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SHARD = 5 * 2**30  # bytes of one file of weights
WRITTEN_ANEW = ("model*.safetensors", INDEX_FILE, "config.json")  # an old model's are never handed over to a new one


class Piece(NamedTuple):
    """Tensors that are made together: their names and kinds (on meta, if need be), and how to get them."""

    layout: Mapping[str, Tensor]
    make: Callable[[], Mapping[str, Tensor]]


def save(model: nn.Module, spec: Model, directory: str | Path, beside: Mapping[str, str] | None = None) -> None:
    """Write the model as a directory, whole or not at all. `beside` are further text files, by name."""
    stored = [d.path for d in declared(spec) if d.weight.stored]
    write_directory(directory, own_pieces({path: tensor_at(model, path) for path in stored}), spec_and(spec, beside or {}))


def own_pieces(tensors: Mapping[str, Tensor]) -> list[Piece]:
    """Tensors as they are, each on its own."""

    def piece(one: dict[str, Tensor]) -> Piece:
        return Piece(one, lambda: one)

    return [piece({path: tensor}) for path, tensor in tensors.items()]


def spec_and(spec: Model, beside: Mapping[str, str]) -> dict[str, bytes]:
    """The files that stand beside the weights: the spec, and further texts."""
    return {SPEC_FILE: to_yaml(spec).encode(), **{name: text.encode() for name, text in beside.items()}}


def write_directory(directory: str | Path, pieces: Sequence[Piece], beside: Mapping[str, bytes], *, shard: int = SHARD) -> None:
    """Write weights and what stands beside them in place of the directory, whole or not at all."""
    target = Path(os.path.abspath(directory))
    fresh, old = _sibling(target, ".tmp"), _sibling(target, ".old")
    for place in (target, fresh, old):
        if place.exists() and not may_replace(place):
            raise FileError(f"{place}: is there and is no model directory; name another place")
    try:
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        (fresh / SPEC_FILE).touch()  # what is left of a run that was cut off may be replaced
        _write_weights(fresh, pieces, shard, target)
        for name, data in beside.items():
            (fresh / name).write_bytes(data)
        _to_disk(fresh)
        _replace(target, fresh, old)
    except FileError:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    except OSError as error:
        raise FileError(f"{target}: cannot be written ({error})") from error


def _write_weights(place: Path, pieces: Sequence[Piece], shard: int, target: Path) -> None:
    """Write one file, or several with an index. `target` is the directory that errors name."""
    groups = _shards(pieces, shard)
    files = [f"model-{i + 1:05}-of-{len(groups):05}.safetensors" for i in range(len(groups))]
    if len(groups) == 1:
        files = [WEIGHTS_FILE]
    for name, group in zip(files, groups, strict=True):
        layout = {name: tensor for piece in group for name, tensor in piece.layout.items()}
        write_tensors(place / name, layout, _finite(group, target))
    if len(groups) > 1:
        where = {tensor: name for name, group in zip(files, groups, strict=True) for piece in group for tensor in piece.layout}
        index = {"metadata": {"total_size": sum(_size(piece) for piece in pieces)}, "weight_map": where}
        (place / INDEX_FILE).write_text(json.dumps(index, indent=2), encoding="utf-8")


def _shards(pieces: Sequence[Piece], shard: int) -> list[list[Piece]]:
    groups: list[list[Piece]] = [[]]
    size = 0
    for piece in pieces:
        if groups[-1] and size + _size(piece) > shard:
            groups.append([])
            size = 0
        groups[-1].append(piece)
        size += _size(piece)
    return groups


def _size(piece: Piece) -> int:
    return sum(tensor.nbytes for tensor in piece.layout.values())


def _finite(pieces: Iterable[Piece], target: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the pieces; raise FileError at the first that holds NaN or infinity."""
    for piece in pieces:
        for name, tensor in piece.make().items():
            if value := nonfinite(tensor):
                raise FileError(f"{target}: {name} holds {value}; nothing was written; start from weights that are finite")
            yield name, tensor


def may_replace(place: Path) -> bool:
    """A directory that is empty or holds a spec may be replaced; anything else is somebody's."""
    return place.is_dir() and ((place / SPEC_FILE).is_file() or not any(place.iterdir()))


def must_be_free(place: Path, force: bool) -> None:
    """Raise unless nothing is there, or a model that may be replaced."""
    if place.exists() and not (may_replace(place) and (force or not any(place.iterdir()))):
        remedy = "name another with -o" + (", or replace it with --force" if may_replace(place) else "")
        raise FileError(f"{place}: is there already; {remedy}")


def _sibling(directory: Path, suffix: str) -> Path:
    """`DIR.tmp` for DIR."""
    return directory.with_name(directory.name + suffix)


def _replace(target: Path, fresh: Path, old: Path) -> None:
    """Put `fresh` in the place of `target`; at every moment one of the three is a whole model."""
    if old.exists():  # an earlier run was cut off in the lines below
        if target.exists():
            _hand_over(old, target)
        else:
            old.rename(target)
    if target.exists():
        target.rename(old)
        fresh.rename(target)
        _hand_over(old, target)
    else:
        fresh.rename(target)
    _sync(target.parent)


def _hand_over(old: Path, new: Path) -> None:
    """Move what only the old directory has; the rest of it was written anew."""
    for kept in old.iterdir():
        stale = any(kept.match(pattern) for pattern in WRITTEN_ANEW)
        if not stale and not (new / kept.name).exists():
            kept.rename(new / kept.name)
    shutil.rmtree(old)


def _to_disk(directory: Path) -> None:
    for file in directory.iterdir():
        _sync(file)
    _sync(directory)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
