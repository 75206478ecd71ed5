"""Open adapter directories, ours or in peft's layout, alone or on their base.

    DIR/adapter.yaml             ours, with the base that it was trained on and its fingerprint
    DIR/adapter_config.json      peft's; beside it adapter.yaml holds the fingerprint where we wrote it

A directory that holds an adapter and no model is opened with the base that it names.
"""

from __future__ import annotations

from pathlib import Path

from dovetail.base.errors import FileError
from dovetail.base.limits import CONFIG_BYTES
from dovetail.decoding.generation import check_generates
from dovetail.disk.model_files import ADAPTER_FILE, INDEX_FILE, PEFT_CONFIG, PEFT_WEIGHTS, WEIGHTS_FILE
from dovetail.disk.untrusted import Directory
from dovetail.hf.origin import origin
from dovetail.hf.peft import read_peft
from dovetail.hf.write import imported_config
from dovetail.model.model import Model, ModelModule
from dovetail.text.tokenizer import check_tokenizer
from dovetail.weights.adapters.attach import Applied
from dovetail.weights.adapters.storage import Stored, base_of, put, read_description, read_stored


def is_adapter(directory: str | Path) -> bool:
    """Whether a directory holds an adapter and no model."""
    where = Directory(directory)
    return _holds_one(where) and not (where.has(WEIGHTS_FILE) or where.has(INDEX_FILE))


def _holds_one(where: Directory) -> bool:
    return where.has(ADAPTER_FILE) or where.has(PEFT_CONFIG)


def read_any(directory: str | Path, spec: Model, family: str | None = None) -> Stored:
    """Read an adapter directory, ours or peft's, for a model of this spec; `family` is that of peft's module names, by default
    the first that can express the spec."""
    where = Directory(directory)
    if not _holds_one(where):
        raise FileError(f"{where.place}: holds no {ADAPTER_FILE} and no {PEFT_CONFIG}; is it an adapter directory?")
    if not where.has(PEFT_WEIGHTS):
        return read_stored(directory)
    stored = read_peft(directory, spec, family)
    return stored._replace(base=base_of(read_description(where))) if where.has(ADAPTER_FILE) else stored


def load_adapter(model: ModelModule, directory: str | Path, *, any_base: bool = False, family: str | None = None) -> Applied:
    """Attach the adapter of a directory to a model; another base than its own is refused, unless with `any_base`."""
    return put(model, read_any(directory, model.part, family), str(directory), any_base=any_base)


def family_of(directory: str | Path) -> str | None:
    """The Hugging Face family that a model directory is of or was imported from; None where it names none."""
    family = imported_config(Directory(directory)).get("model_type")
    return family if isinstance(family, str) else None


def base_place(directory: str | Path) -> Path:
    """The directory of the base that an adapter directory names, as it is written there or beside the adapter."""
    where = Directory(directory)
    name = None
    if where.has(ADAPTER_FILE):
        base = base_of(read_description(where))
        name = None if base is None else base.name
    if name is None and where.has(PEFT_CONFIG):
        given = where.json(PEFT_CONFIG, CONFIG_BYTES).get("base_model_name_or_path")
        name = given if isinstance(given, str) else None
    for place in () if name is None else (Path(name), where.place.parent / name, where.place.parent / Path(name).name):
        if place.is_dir() and not is_adapter(place):
            return place
    named = "names no base" if name is None else f"its base {name[:200]} is not there"
    raise FileError(f"{where.place}: holds an adapter, and {named}; give the model and --adapter {where.place}")


def check_generates_text(directory: str | Path) -> None:
    """Raise, before any weight is read, where the model of a directory cannot generate text."""
    where = Directory(base_place(directory) if is_adapter(directory) else directory)
    check_generates(origin(where).spec)
    check_tokenizer(where)
