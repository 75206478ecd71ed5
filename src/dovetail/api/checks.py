"""Checks of flags that need no torch: paths and spec names are refused before anything heavy is imported."""

from __future__ import annotations

import stat
from pathlib import Path

from dovetail.base.errors import FileError, UsageError
from dovetail.disk.atomic import check_writable
from dovetail.disk.presets import find_preset
from dovetail.disk.replace import set_aside
from dovetail.disk.untrusted import PICKLES, Directory, exists
from dovetail.disk.yaml import parse_yaml, read_text

FOREIGN = ("hf:", "py:", "emit:", "http://", "https://")  # models of other libraries, opened by the verb


def check_spec(name: str) -> None:
    """Raise unless the name is that of a preset, of a file with valid YAML or of a directory."""
    path = Path(name)
    if name.startswith(FOREIGN):
        return
    if not exists(path):
        find_preset(name)
    elif not path.is_dir() and path.suffix not in PICKLES:  # a pickle is refused with the reason by the reader
        parse_yaml(read_text(path), name)


def check_directory(path: Path) -> None:
    """Raise unless the path is that of a directory. One whose replacement was interrupted is reported by the reader."""
    if not set_aside(path):
        Directory(path)


def check_file(path: Path) -> None:
    """Raise unless the path is that of a regular file; a pipe would block."""
    if not exists(path):
        raise FileError(f"{path}: cannot be read (No such file or directory)")
    if path.is_dir():
        raise FileError(f"{path}: is a directory; give a file")
    if not stat.S_ISREG(path.stat().st_mode):
        raise FileError(f"{path}: is not a regular file")


def check_path(path: Path) -> None:
    """Raise unless the path is that of a regular file or of a directory."""
    if path.is_file():
        check_file(path)
    else:
        check_directory(path)


def check_output(path: Path) -> None:
    """Raise unless something can be written at this path."""
    check_writable(path)


def check_reward(name: str) -> None:
    """Raise for the import path of a reward: a command line runs no function that it names."""
    if ":" in name:
        raise UsageError("--reward: an import path is valid only in Python: dovetail.tune(..., reward='module:function')")
