"""Files that the public functions write: text under a name that the user chose."""

from __future__ import annotations

from pathlib import Path

from dovetail.core.errors import FileError
from dovetail.io.atomic import write_atomically


def check_free(path: Path, force: bool) -> None:
    """Raise FileError unless nothing is at this path, or a file that may be replaced."""
    if path.exists() and not (force and path.is_file()):
        remedy = "choose another path with -o" + ("" if force else ", or replace it with --force")
        raise FileError(f"{path}: exists already; {remedy}")


def write_new(path: Path, text: str, force: bool) -> None:
    """Write a text file; an existing one is replaced only if `force`."""
    check_free(path, force)
    write_atomically(path, text)
