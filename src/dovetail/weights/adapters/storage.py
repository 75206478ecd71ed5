"""An adapter directory of ours: the adapters of a model, without the model.

    DIR/adapter.yaml             the kind and its fields, the base and its fingerprint, and the checksum of the tensors
    DIR/adapter.safetensors      every tensor of the adapters under its path

`adapter.yaml` is written last and names the SHA-256 of the tensors, so that a directory is complete or refused. Another base
than the one that the adapter was trained on is refused by its fingerprint. The layout of peft is in hf/peft.py.

    fingerprint = sha256 over the paths, shapes and up to SAMPLE evenly spaced values of every stored weight, as float32

It takes milliseconds for a model of any size, and is the same for a model in Hugging Face layout and in ours, and for weights
that were loaded in a wider dtype. Bases that were trained apart differ in nearly every value. It recognizes a base; it does not
prove that no bit was changed, as a checksum of the files does.

The tensors of a model's adapters, by path: what is saved of them, and put back.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dovetail.base.errors import FileError
from dovetail.base.limits import SPEC_BYTES
from dovetail.disk.atomic import check_writable, write_atomically
from dovetail.disk.model_files import ADAPTER_FILE, ADAPTER_WEIGHTS
from dovetail.disk.shape import data_sha256, file_sha256
from dovetail.disk.tensors import TensorFile, write_tensors
from dovetail.disk.untrusted import Directory
from dovetail.disk.yaml import dump_yaml, parse_yaml
from dovetail.model.model import ModelModule
from dovetail.nn.declared_tensors import adapted_leaves
from dovetail.nn.finite import nonfinite
from dovetail.nn.module import tensor_at
from dovetail.spec.fold import Declared, declared
from dovetail.spec.part import Part, plain
from dovetail.weights.adapters.attach import Applied, attach, read_adapter
from dovetail.weights.adapters.kind import AdapterKind

# -- the fingerprint of a base ----------------------------------------------------------------------------------------


SAMPLE = 4096  # values per weight


class Fingerprint:
    """Takes weights one at a time, in any order."""

    def __init__(self) -> None:
        self.digests: dict[str, str] = {}

    def add(self, path: str, tensor: Tensor) -> None:
        """Take one weight."""
        flat = tensor.detach().reshape(-1)
        values = flat[:: max(1, -(-flat.numel() // SAMPLE))].cpu().to(torch.float32).contiguous()
        digest = hashlib.sha256(str(tuple(tensor.shape)).encode() + values.numpy().tobytes())
        self.digests[path] = digest.hexdigest()

    def watch(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Pass weights (path, tensor) on, each taken as it passes."""
        for path, tensor in weights:
            self.add(path, tensor)
            yield path, tensor

    def value(self) -> str:
        """The fingerprint of the weights taken."""
        return data_sha256(self.digests)


def fingerprint(model: nn.Module, spec: Part) -> str:
    """The fingerprint of a model's own weights, without its adapters."""
    found = Fingerprint()
    for d in declared(spec):
        if d.weight.stored:
            found.add(d.path, tensor_at(model, d.path))
    return found.value()


# -- the directory ----------------------------------------------------------------------------------------------------


FORMAT = 1


class Base(NamedTuple):
    """The model that an adapter belongs to: the directory it was loaded from, and the fingerprint of its weights."""

    name: str | None
    fingerprint: str


class Stored(NamedTuple):
    """An adapter as it is stored: its kind, its base (None where the directory names none), and its tensors by path."""

    kind: AdapterKind
    base: Base | None
    tensors: dict[str, Tensor]


def write_adapter(place: Path, stored: Stored) -> None:
    """Write an adapter into a directory, beside what is there. Values that are not finite are refused."""
    for path, tensor in stored.tensors.items():
        if value := nonfinite(tensor):
            raise FileError(f"{place}: {path} holds {value}; nothing was written; train with a lower learning rate")
    check_writable(place / ADAPTER_FILE)
    place.mkdir(parents=True, exist_ok=True)
    fresh = place / f".{ADAPTER_WEIGHTS}.{secrets.token_hex(4)}.tmp"
    try:
        write_tensors(fresh, stored.tensors, stored.tensors.items())
        digest = file_sha256(fresh)
        fresh.replace(place / ADAPTER_WEIGHTS)
    finally:
        fresh.unlink(missing_ok=True)
    base = {} if stored.base is None else {"base": stored.base._asdict()}
    write_atomically(
        place / ADAPTER_FILE, dump_yaml({"format": FORMAT, "adapter": plain(stored.kind), **base, "sha256": digest})
    )


def read_stored(place: str | Path) -> Stored:
    """Read an adapter directory of ours."""
    where = Directory(place)
    data = read_description(where)
    file = where.path(ADAPTER_WEIGHTS)
    if file_sha256(file) != data.get("sha256"):
        raise FileError(f"{file}: is damaged, or not the file that {ADAPTER_FILE} describes: its sha256 is another")
    with TensorFile(file) as tensors:
        found = {name: tensors.read(name).clone() for name in tensors.entries}
    return Stored(read_adapter(data["adapter"], f"{where.place / ADAPTER_FILE}: adapter"), base_of(data), found)


def read_description(where: Directory) -> dict[str, Any]:
    """Read the description of an adapter directory."""
    name = str(where.place / ADAPTER_FILE)
    data = parse_yaml(where.text(ADAPTER_FILE, SPEC_BYTES), name)
    if not isinstance(data, dict) or data.get("format") != FORMAT or "adapter" not in data:
        raise FileError(f"{name}: is not the description of an adapter of format {FORMAT}")
    return data


def base_of(data: Mapping[str, Any]) -> Base | None:
    """The base that a description names; None where it names none."""
    base = data.get("base")
    if not isinstance(base, dict) or not isinstance(base.get("fingerprint"), str):
        return None
    name = base.get("name")
    return Base(name if isinstance(name, str) else None, base["fingerprint"])


def check_base(model: ModelModule, stored: Stored, shown: str) -> None:
    """Raise FileError where an adapter names another base than the model."""
    if stored.base is not None and (own := fingerprint(model, model.part)) != stored.base.fingerprint:
        named = f" ({stored.base.name})" if stored.base.name else ""
        what = f"was trained on another base{named}: its fingerprint is {stored.base.fingerprint[:12]}…, not {own[:12]}…"
        raise FileError(f"{shown}: {what}; load it on that base")


def put(model: ModelModule, stored: Stored, shown: str, *, any_base: bool = False, dtype: torch.dtype | None = None) -> Applied:
    """Attach a stored adapter to a model; `shown` names it in errors. Another base is refused, unless with `any_base`."""
    if not any_base:
        check_base(model, stored, shown)
    applied = attach(model, stored.kind, dtype=dtype)
    set_adapter(model, stored.tensors)
    return applied


def adapter_declared(model: nn.Module) -> dict[str, Declared]:
    """The declared tensors of all adapters by path, each once."""
    return {d.path: d for _, leaf in adapted_leaves(model) if leaf.adapter is not None for d in leaf.adapter.declared}


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The parameters of all adapters by path."""
    return {path: tensor_at(model, path).detach() for path in adapter_declared(model)}


def check_tensors(shapes: Mapping[str, Sequence[int]], tensors: Mapping[str, Tensor]) -> None:
    """Raise FileError for a tensor that is missing, unknown or of another shape than the model says."""
    for path in [*shapes, *tensors]:
        if path not in tensors:
            raise FileError(f"{path}: is missing; the adapter was saved with other targets")
        if path not in shapes:
            raise FileError(f"{path}: the model has no such adapter; it was saved with other targets")
        if tuple(shapes[path]) != tuple(tensors[path].shape):
            raise FileError(f"{path}: has shape {list(tensors[path].shape)}; the model says {list(shapes[path])}")


@torch.no_grad()
def set_adapter(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors into the adapters of a model. Raises FileError for one that is missing, unknown or of another shape."""
    own = adapter_tensors(model)
    check_tensors({path: tensor.shape for path, tensor in own.items()}, tensors)
    for path, tensor in own.items():
        tensor.copy_(tensors[path])
