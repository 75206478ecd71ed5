"""Files that the public functions write: text under a name that the user chose."""

from __future__ import annotations

from pathlib import Path

from dovetail.disk.atomic import check_free, write_atomically


def write_new(path: Path, text: str, force: bool) -> None:
    """Write a text file; an existing one is replaced only if `force`."""
    check_free(path, force)
    write_atomically(path, text)
