"""Arguments that the public functions share: a spec or a model in any of several forms, numbers, functions to report to.

"llama-tiny"                     a preset
"spec.yaml", Path("my-model")    a file, or a model directory of either layout; a path takes precedence over a preset
"width: 64\\nlayers: …"           YAML text, or a mapping of plain data
Model(…)                         a spec
build(…), load(…)                a model: its spec
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dovetail.base.value import Unresolved
from dovetail.spec.part import plain

if TYPE_CHECKING:
    from dovetail.files.spec import Changes as Changes
    from dovetail.hf import origin
    from dovetail.model.model import Model, ModelModule

    SpecLike = origin.SpecLike | ModelModule
else:  # the other types of a spec need torch
    SpecLike = str | Path | Mapping[str, Any] | Unresolved
    Changes = str | Iterable[str] | Mapping[str, Any]


class NamedSpec(NamedTuple):
    """A spec, its name for titles and errors, and its model directory if it has one."""

    name: str
    spec: Model
    directory: Path | None = None

    def after(self, set: Changes, swap: Changes) -> NamedSpec:
        """Return the spec after the changes; the name lists them."""
        from dovetail.files.spec import changed, listed

        set, swap = listed(set), listed(swap)
        return NamedSpec(_name(self.name, set, swap), changed(self.spec, set, swap), self.directory)


def read_spec(value: SpecLike | NamedSpec) -> NamedSpec:
    """Return the spec that an argument names."""
    from dovetail.hf import origin
    from dovetail.model.model import ModelModule

    if isinstance(value, NamedSpec):
        return value
    if isinstance(value, ModelModule):
        return NamedSpec("model", value.part)
    spec = origin.find_spec(value)
    if not isinstance(value, (str, Path)) or origin.is_yaml(value):
        return NamedSpec("spec", spec)
    path = Path(value)
    return NamedSpec(str(value), spec, path if path.is_dir() else None)


def silent(*_: object) -> None:
    """Report nothing: the default of `progress` and `note`."""


def _name(name: str, set: Changes, swap: Changes) -> str:
    """Return `llama-tiny --swap position=alibi`: the name and the changes as on the command line."""
    return " ".join([name, *(f"--swap {text}" for text in _texts(swap)), *(f"--set {text}" for text in _texts(set))])


def _texts(changes: Changes) -> list[str]:
    from dovetail.account import format_value

    if isinstance(changes, str):
        return [changes]
    if isinstance(changes, Mapping):
        return [f"{where}={format_value(plain(changes[where]))}" for where in changes]
    return list(changes)
