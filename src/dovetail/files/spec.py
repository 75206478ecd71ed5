"""Read a spec by preset name, YAML file or model directory; write it as YAML; apply the changes of a command line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dovetail import parts as _registered  # noqa: F401  registers every kind
from dovetail.base.errors import FileError, SpecError
from dovetail.disk.model_files import SPEC_FILE
from dovetail.disk.presets import find_preset, preset_names
from dovetail.disk.untrusted import exists, is_directory
from dovetail.disk.yaml import dump_yaml, parse_yaml, read_text
from dovetail.model.model import Model
from dovetail.spec.part import from_data, plain


def to_yaml(spec: Model) -> str:
    """Return the spec as YAML; reading it back gives an equal spec."""
    return dump_yaml(spec.to_data())


def from_yaml(text: str, where: str = "spec") -> Model:
    """Return the spec in YAML text; `where` names the text in errors."""
    return from_mapping(parse_yaml(text, where))


def from_mapping(data: Mapping[str, Any]) -> Model:
    """Return the spec of plain data, as YAML holds it."""
    return from_data(data, Model)


def zoo() -> list[str]:
    """Return the names of the presets."""
    return list(preset_names())


def load_spec(name: str | Path) -> Model:
    """Return a spec by preset name, .yaml file or model directory; a path takes precedence over a name."""
    path = Path(name)
    if is_directory(path):
        path = path / SPEC_FILE
        if not path.is_file():
            raise FileError(f"{name}: holds no {SPEC_FILE}")
    elif not exists(path):
        return from_yaml(find_preset(str(name)), f"{name}.yaml")
    return from_yaml(read_text(path), str(path))


Changes = Iterable[str] | Mapping[str, Any]  # `path=value` strings as on the command line, or path -> value


def changed(spec: Model, sets: Changes = (), swaps: Changes = ()) -> Model:
    """Return the spec after swaps (group or path -> part) and then settings (path -> value). In `path=value` strings the values
    are YAML."""
    for where, value in assignments(swaps, "--swap"):
        spec = spec.swap(where, value)
    for where, value in assignments(sets, "--set"):
        spec = spec.set(where, value)
    return spec


def swap_losses(spec: Model, swaps: Changes) -> list[str]:
    """One line for each field that the swaps drop; equal lines of several layers are one, with `layers.*`."""
    lines: dict[str, None] = {}
    for where, value in assignments(swaps, "--swap"):
        for lost in spec.swap_losses(where, value):
            path = ".".join("*" if name.isdigit() else name for name in lost.path.split("."))
            lines[str(lost._replace(path=path, value=plain(lost.value)))] = None
        spec = spec.swap(where, value)
    return list(lines)


def listed(changes: Changes) -> Changes:
    """Return changes that can be read more than once: those of an iterator as a tuple."""
    return changes if isinstance(changes, str | Mapping) else tuple(changes)


def assignments(changes: Changes, flag: str) -> Iterator[tuple[str, Any]]:
    """(path, value) of every change; `flag` names the changes in errors."""
    if isinstance(changes, Mapping):
        yield from changes.items()
        return
    for text in (changes,) if isinstance(changes, str) else changes:
        where, equals, value = text.partition("=")
        if not equals or not where:
            raise SpecError(where, f"{flag} takes path=value, not {text!r}")
        yield where, parse_yaml(value, f"{flag} {where}")
