"""The spec of a model directory: ours (`dovetail.yaml`), in Hugging Face layout (`config.json`), or both; of a name or text.

dovetail.yaml  config.json    the spec                       the names of the tensors
     yes           –          dovetail.yaml                  our paths
      –           yes         described by config.json       those of config.json's family
     yes          yes         both, which must agree         those of config.json's family
      any    of our own type  in config.json                 our paths
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dovetail.base.errors import FileError, SpecError
from dovetail.base.limits import CONFIG_BYTES, SPEC_BYTES
from dovetail.disk.model_files import CONFIG_FILE, INDEX_FILE, SPEC_FILE, WEIGHTS_FILE
from dovetail.disk.tensors import TensorFile
from dovetail.disk.untrusted import PICKLES, Directory
from dovetail.files.spec import from_mapping, from_yaml, load_spec
from dovetail.hf.dialect import DIALECTS
from dovetail.hf.hf import from_hf
from dovetail.hf.own_config import is_own, spec_of
from dovetail.hf.quantized import split_quantization
from dovetail.hf.resolved import differences, explicit, untrained
from dovetail.hf.tensors import count_ahead
from dovetail.model.model import Model

SpecLike = Model | str | Path | Mapping[str, Any]  # what `find_spec` takes


class Origin(NamedTuple):
    """The spec of a directory, and its config if its tensors have the names of a Hugging Face family."""

    spec: Model
    config: Mapping[str, Any] | None


def origin(where: Directory) -> Origin:
    """Read the spec of a directory, and the config if it has one."""
    own = from_yaml(where.text(SPEC_FILE, SPEC_BYTES), str(where.place / SPEC_FILE)) if where.has(SPEC_FILE) else None
    if not where.has(CONFIG_FILE):
        if own is None:
            raise FileError(f"{where.place}: holds neither {CONFIG_FILE} nor {SPEC_FILE}")
        return Origin(own, None)
    config = where.json(CONFIG_FILE, CONFIG_BYTES)
    own_type = is_own(config)
    config = config if own_type else _as_stored(config, where)
    described = (spec_of if own_type else _read_config)(config, where.place / CONFIG_FILE)
    if own is None:
        return Origin(described, None if own_type else config)
    for path, ours, theirs in differences(explicit(untrained(own, described)), explicit(described)):
        raise FileError(f"{where.place}: {path} is {ours} in {SPEC_FILE} and {theirs} in {CONFIG_FILE}; remove one of them")
    return Origin(own, None if own_type else config)


def _as_stored(config: Mapping[str, Any], where: Directory) -> Mapping[str, Any]:
    """The config with the number of depths of multi-token prediction that the files have, where there are files."""
    dialect = DIALECTS.get(str(config.get("model_type")))
    if dialect is None or dialect.ahead is None or not (where.has(WEIGHTS_FILE) or where.has(INDEX_FILE)):
        return config
    if where.has(WEIGHTS_FILE):
        with TensorFile(where.path(WEIGHTS_FILE), where.place / WEIGHTS_FILE) as file:
            return count_ahead(config, dialect, file.entries)
    return count_ahead(config, dialect, tensor_index(where))


def find_spec(name: SpecLike) -> Model:
    """A spec from whatever names or holds one: a preset's name, a .yaml file or a model directory of either layout (a path
    takes precedence over a name), YAML text, a mapping of plain data, or a spec."""
    if isinstance(name, Model):
        return name
    if isinstance(name, Mapping):
        return from_mapping(name)
    if isinstance(name, str) and is_yaml(name):
        return from_yaml(name)
    path = Path(name)
    if path.is_dir() or (path.is_file() and path.suffix in PICKLES):  # a pickle is refused with the reason
        return origin(Directory(path)).spec
    return load_spec(name)


def is_yaml(name: str | Path) -> bool:
    """Whether a string is YAML text rather than a name or a path."""
    return isinstance(name, str) and ("\n" in name or ": " in name) and not _exists(Path(name))


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # longer than a name may be, as YAML text is; or with a NUL
        return False


def _read_config(config: Mapping[str, Any], file: Path) -> Model:
    if config.get("auto_map"):
        remedy = f"take auto_map out to read it as a plain {str(config.get('model_type'))[:60]}"
        raise FileError(f"{file}: auto_map names code to be run; nothing in a model directory is run here; {remedy}")
    try:
        return from_hf(split_quantization(config)[0])
    except SpecError as error:
        path = error.path.removeprefix("config").removeprefix(".")
        raise SpecError(f"{file}: {path[:200]}" if path else str(file), error.problem[:500], error.remedy[:500]) from error


def tensor_index(where: Directory) -> dict[str, str]:
    """The name of the file of each tensor."""
    weight_map = where.json(INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FileError(f"{where.place / INDEX_FILE}: weight_map is not a mapping of tensors to files")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not name.endswith(".safetensors"):
            raise FileError(f"{where.place / INDEX_FILE}: weight_map.{tensor[:200]} names no file of safetensors")
    return weight_map
