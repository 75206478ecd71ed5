"""Write a model directory, whole or not at all.

    DIR/dovetail.yaml        the spec
    DIR/model.safetensors    every stored weight under its path, once; tied weights and constants follow from the spec
    DIR/quantization.yaml    which weights are stored in fewer bits, and how (weights/quantization/recipe.py)
    DIR/…                    further files: a tokenizer, a record of losses

An existing model directory is replaced as a whole (disk/replace.py): none of its model files stay, since a chat template or
generation config of another model would silently apply to the new one. A writer that wants such files passes them. A directory
with foreign files (disk/model_files.py) is refused before any work. Weights beyond SHARD bytes are split into several files
with an index, `model.safetensors.index.json`. Reading is in hf/load.py, for directories of both layouts.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor, nn

from dovetail.base.errors import FileError
from dovetail.disk.atomic import delete_leftovers
from dovetail.disk.model_files import INDEX_FILE, MODEL_FILES, QUANTIZATION_FILE, SPEC_FILE, WEIGHTS_FILE, foreign, listed
from dovetail.disk.replace import replacing
from dovetail.disk.tensors import write_tensors
from dovetail.files.spec import to_yaml
from dovetail.model.model import Model
from dovetail.nn.declared_tensors import check_plain, stored
from dovetail.nn.finite import nonfinite
from dovetail.weights.quantization.leaf import SAVED
from dovetail.weights.quantization.recipe import recipe_of, recipe_yaml

SHARD = 5 * 2**30  # bytes per file of weights


class LazyTensors(NamedTuple):
    """Tensors that are computed together: their names, shapes and dtypes (on meta, if need be), and a function that returns
    them."""

    layout: Mapping[str, Tensor]
    make: Callable[[], Mapping[str, Tensor]]


def save(
    model: nn.Module,
    spec: Model,
    directory: str | Path,
    beside: Mapping[str, str | bytes] | None = None,
    *,
    keep_foreign: bool = False,
) -> None:
    """Write the model as a directory, whole or not at all; an existing model directory is replaced with all its model files.
    `beside` are further files, by name. A directory with foreign files is refused, or they are kept with `keep_foreign`."""
    check_plain(model, spec, SAVED)
    write_directory(
        directory, own_pieces(dict(stored(model, spec))), model_files(model, spec, beside or {}), keep_foreign=keep_foreign
    )


def own_pieces(tensors: Mapping[str, Tensor]) -> list[LazyTensors]:
    """Return one piece per tensor."""

    def piece(one: dict[str, Tensor]) -> LazyTensors:
        return LazyTensors(one, lambda: one)

    return [piece({path: tensor}) for path, tensor in tensors.items()]


def spec_and(spec: Model, beside: Mapping[str, str | bytes]) -> dict[str, bytes]:
    """Return the files beside the weights: the spec, and further ones."""
    files = {name: data.encode() if isinstance(data, str) else data for name, data in beside.items()}
    return {SPEC_FILE: to_yaml(spec).encode(), **files}


def model_files(model: nn.Module, spec: Model, beside: Mapping[str, str | bytes]) -> dict[str, bytes]:
    """Return the files beside the weights of a model: the spec, how quantized leaves are stored, and further ones."""
    recipe = recipe_of(model)
    return {**spec_and(spec, beside), **({QUANTIZATION_FILE: recipe_yaml(recipe).encode()} if recipe else {})}


def write_directory(
    directory: str | Path,
    pieces: Sequence[LazyTensors],
    beside: Mapping[str, bytes],
    *,
    shard: int = SHARD,
    keep_foreign: bool = False,
) -> None:
    """Write weights and the files beside them in place of the directory, whole or not at all. A directory with foreign files is
    refused, or they are kept with `keep_foreign`."""
    check = _check_is_model if keep_foreign else functools.partial(check_replaceable, beside=beside)
    with replacing(directory, check) as fresh:
        _write_weights(fresh, pieces, shard, Path(directory))
        for name, data in beside.items():
            (fresh / name).write_bytes(data)
        if keep_foreign:
            _link_foreign(Path(directory), fresh, beside)


def _link_foreign(old: Path, fresh: Path, beside: Iterable[str]) -> None:
    """Hard-link the foreign files of the old directory into the new one: until the swap both have them."""
    for name in foreign(old, beside) if old.is_dir() else ():
        source, target = old / name, fresh / name
        if name.endswith("/"):
            shutil.copytree(source, target, symlinks=True, copy_function=_link)
        else:
            _link(source, target)


def _link(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target, follow_symlinks=False)


def _write_weights(place: Path, pieces: Sequence[LazyTensors], shard: int, target: Path) -> None:
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


def _shards(pieces: Sequence[LazyTensors], shard: int) -> list[list[LazyTensors]]:
    groups: list[list[LazyTensors]] = [[]]
    size = 0
    for piece in pieces:
        if groups[-1] and size + _size(piece) > shard:
            groups.append([])
            size = 0
        groups[-1].append(piece)
        size += _size(piece)
    return groups


def _size(piece: LazyTensors) -> int:
    return sum(tensor.nbytes for tensor in piece.layout.values())


def _finite(pieces: Iterable[LazyTensors], target: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the pieces; raise FileError at the first that holds NaN or infinity."""
    for piece in pieces:
        for name, tensor in piece.make().items():
            if value := nonfinite(tensor):
                raise FileError(f"{target}: {name} holds {value}; nothing was written; start from weights that are finite")
            yield name, tensor


def check_replaceable(place: str | Path, beside: Iterable[str] = (), inside: Iterable[str] = ()) -> None:
    """Raise unless nothing is there, or an empty directory, or a model directory without foreign files; `beside`: further files
    that the writer writes anew; `inside`: sub-directories that are the writer's own."""
    place = Path(place)
    if not place.exists():
        return
    _check_is_model(place)
    beside = tuple(beside)
    for name in (*MODEL_FILES, *beside):
        delete_leftovers(place / name)
    if names := [name for name in foreign(place, beside) if name not in {f"{one}/" for one in inside}]:
        raise FileError(f"{place}: holds files that are not the model's: {listed(names)}; move them, or choose another path")


def _check_is_model(place: Path) -> None:
    if not place.is_dir() or (any(place.iterdir()) and not (place / SPEC_FILE).is_file()):
        raise FileError(f"{place}: exists and is not a model directory; choose another path")


def must_be_free(place: Path, force: bool, inside: Iterable[str] = ()) -> None:
    """Raise unless nothing is there, or an empty directory, or with `force` a model directory that may be replaced, with the
    sub-directories `inside`."""
    check_replaceable(place, inside=inside)
    if place.exists() and any(place.iterdir()) and not force:
        raise FileError(f"{place}: exists already; choose another path with -o, or replace it with --force")
