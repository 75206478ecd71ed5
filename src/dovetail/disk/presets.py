"""Names and texts of the presets, without torch."""

from __future__ import annotations

import functools
from importlib import resources

from dovetail.base.errors import FileError, names_or_nearest

FOLDER, SUFFIX = "dovetail.zoo", ".yaml"


@functools.cache
def preset_names() -> tuple[str, ...]:
    """Return the names of the presets, sorted."""
    return tuple(sorted(f.name.removesuffix(SUFFIX) for f in resources.files(FOLDER).iterdir() if f.name.endswith(SUFFIX)))


def find_preset(name: str) -> str:
    """Return the YAML text of a preset. The error of an unknown name has the nearest ones."""
    if name not in preset_names():
        is_path = "/" in name or name.endswith(SUFFIX)
        known = "" if is_path else f", directory or preset; {names_or_nearest(name, preset_names(), 'presets')}"
        raise FileError(f"{name}: no such file{known}")
    return (resources.files(FOLDER) / f"{name}{SUFFIX}").read_text(encoding="utf-8")
