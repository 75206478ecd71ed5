"""A model directory: what a model is, and its weights. Nothing in it is code.

    DIR/dovetail.yaml        the spec
    DIR/model.safetensors    every stored weight under its path, once; tied weights and constants follow from the spec
    DIR/…                    whatever stands beside them (a tokenizer, a record of losses)

A directory is written whole as `DIR.tmp`, forced to disk and renamed, so no reader ever finds half a model. An older directory
steps aside as `DIR.old`, hands over the files that were not written anew, and goes.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from dovetail.build import build, tie
from dovetail.core.errors import FileError
from dovetail.core.fold import declared
from dovetail.core.module import holder, tensor_at
from dovetail.model import Model, ModelModule
from dovetail.spec import SPEC_FILE, load_spec, to_yaml

WEIGHTS_FILE = "model.safetensors"


def save(model: nn.Module, spec: Model, directory: str | Path, beside: Mapping[str, str] | None = None) -> None:
    """Write the model as a directory, whole or not at all. `beside` are further text files, by name."""
    target = Path(os.path.abspath(directory))
    fresh, old = _sibling(target, ".tmp"), _sibling(target, ".old")
    for place in (target, fresh, old):
        if place.exists() and not may_replace(place):
            raise FileError(f"{place}: is there and is no model directory; name another place")
    weights = {path: tensor_at(model, path).detach().cpu().contiguous() for path in _shapes(spec)}
    try:
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        (fresh / SPEC_FILE).write_text(to_yaml(spec), encoding="utf-8")
        save_file(weights, fresh / WEIGHTS_FILE, metadata={"format": "pt"})
        (fresh / WEIGHTS_FILE).chmod((fresh / SPEC_FILE).stat().st_mode)  # readable by whom the other files are
        for name, text in (beside or {}).items():
            (fresh / name).write_text(text, encoding="utf-8")
        _to_disk(fresh)
        _replace(target, fresh, old)
    except (OSError, SafetensorError) as error:
        raise FileError(f"{target}: cannot be written ({error})") from error


def load(directory: str | Path) -> tuple[Model, ModelModule]:
    """The spec and the model of a directory, every weight bit for bit and in the dtype it was saved in."""
    where = Path(os.path.abspath(directory))
    if not where.is_dir():
        kept = _sibling(where, ".old")
        hint = f"; a whole older one is at {kept}" if may_replace(kept) else ""
        raise FileError(f"{where}: no such directory{hint}")
    spec = load_spec(where)
    weights = _read_weights(where / WEIGHTS_FILE, _shapes(spec))
    learned = {d.path for d in declared(spec) if d.weight.learned}
    model = build(spec, dtype=functools.reduce(torch.promote_types, {weights[path].dtype for path in learned}))
    for path, tensor in weights.items():
        module, leaf = holder(model, path)
        if path in learned:
            module.register_parameter(leaf, nn.Parameter(tensor))
        else:
            module.register_buffer(leaf, tensor)
    tie(model, spec)
    return spec, model


def may_replace(place: Path) -> bool:
    """A directory that is empty or holds a spec may be replaced; anything else is somebody's."""
    return place.is_dir() and ((place / SPEC_FILE).is_file() or not any(place.iterdir()))


def _shapes(spec: Model) -> dict[str, tuple[int, ...]]:
    """The shape of every weight that is stored, by its path."""
    return {d.path: d.weight.shape(d.env) for d in declared(spec) if d.weight.stored}


def _read_weights(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """The tensors of a file, held to what the spec declares before any is read."""
    if not path.is_file():
        raise FileError(f"{path}: no such file")
    try:
        with safe_open(path, framework="pt") as file:
            found = set(file.keys())
            if unknown := sorted(found - set(shapes)):
                raise FileError(f"{path}: {unknown[0]} is no weight of this spec{_more(unknown)}; was the spec edited?")
            if missing := sorted(set(shapes) - found):
                raise FileError(f"{path}: {missing[0]} is missing{_more(missing)}; was the spec edited?")
            for name, shape in shapes.items():
                given = tuple(file.get_slice(name).get_shape())
                if given != shape:
                    raise FileError(f"{path}: {name} is {list(given)}; the spec says {list(shape)}")
            tensors = {name: file.get_tensor(name).clone() for name in shapes}
    except (SafetensorError, OSError) as error:
        raise FileError(f"{path}: is damaged or no safetensors file ({error})") from error
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise FileError(f"{path}: {name} holds {tensor.dtype}, not floating-point numbers")
    return tensors


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


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
        if not (new / kept.name).exists():
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
