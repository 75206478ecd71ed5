"""Write a file as a whole or not at all: a reader sees the old content or the new one, and a full disk leaves the old one.

    write_atomically("page.html", text)       .page.html.PID-RANDOM.tmp beside it, synced to disk, then renamed

Every writer has a temporary file of its own, which it deletes if it fails; what a killed writer leaves is deleted by the next.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from dovetail.base.errors import FileError
from dovetail.disk.untrusted import problem

NAME_BYTES = 150  # of the target's name in a temporary name: file systems allow 255 in all


def write_atomically(path: str | Path, content: str | bytes) -> None:
    """Write the content in place of the file; a string is written as UTF-8, what is no Unicode as escapes."""
    with writing(path) as file:
        file.write(content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content)


@contextlib.contextmanager
def writing(path: str | Path) -> Iterator[BinaryIO]:
    """Yield a file to write; on leaving without an error it takes the place of `path`. A link is followed."""
    try:
        target = _regular(Path(path))
        delete_leftovers(target)
        fresh = temporary_path(target)
        handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except (OSError, ValueError, RuntimeError) as error:
        raise FileError(f"{path}: cannot be written ({problem(error)})") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)  # held while this process lives: the next writer deletes what is not locked
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(fresh, target)
    except OSError as error:
        raise FileError(f"{path}: cannot be written ({problem(error)})") from error
    finally:
        with contextlib.suppress(OSError):
            os.unlink(fresh)


def check_free(path: str | Path, force: bool, remedy: str = "choose another path, or replace it with --force") -> None:
    """Raise FileError unless nothing is at this path, or with `force` a file, which is replaced."""
    if os.path.lexists(path) and not (force and Path(path).is_file()):
        raise FileError(f"{path}: exists already; {'choose another path' if force else remedy}")


def write_new(path: Path, text: str, force: bool) -> None:
    """Write a text file; an existing one is replaced only if `force`."""
    check_free(path, force)
    write_atomically(path, text)


def check_writable(path: str | Path) -> None:
    """Raise FileError unless a file or directory can be created at this path; nothing is left there."""
    try:
        parent = Path(os.path.abspath(path)).parent
        with contextlib.suppress(FileNotFoundError):
            os.lstat(path)  # raises for a name that no file can have: too long, NUL, a lone surrogate
        while not parent.exists():
            parent = parent.parent
        with tempfile.TemporaryFile(dir=parent):
            pass
    except (OSError, ValueError) as error:
        raise FileError(f"{path}: cannot be written ({problem(error)})") from error


def _regular(path: Path) -> Path:
    """Return the real path of a regular file, or of one that can be created."""
    target = path.resolve()
    if os.path.lexists(target) and not stat.S_ISREG(os.lstat(target).st_mode):
        raise FileError(f"{path}: is not a regular file; choose another path")
    return target


# -- temporary names and locks ------------------------------------------------------------------------------------------


def temporary_path(target: Path) -> Path:
    """Return a new path beside the target for its next content; `temporary_paths` finds it."""
    return target.with_name(f"{_prefix(target)}{os.getpid()}-{secrets.token_hex(4)}.tmp")


def temporary_paths(target: Path) -> Iterator[Path]:
    """Yield what writers of this target have beside it, those that were killed included."""
    pattern = re.compile(re.escape(_prefix(target)) + r"\d+-[0-9a-f]{8}\.(tmp|old)")
    for name in os.listdir(target.parent) if target.parent.is_dir() else ():
        if pattern.fullmatch(name):
            yield target.with_name(name)


def _prefix(target: Path) -> str:
    return f".{os.fsdecode(os.fsencode(target.name)[:NAME_BYTES])}."


def delete_leftovers(target: Path) -> None:
    """Delete the temporary files of killed writers of this target: those that no living process has locked."""
    for path in temporary_paths(target):
        with contextlib.suppress(OSError), try_locked(path) as locked:  # another writer may delete it at the same time
            if locked:
                os.unlink(path)


def try_lock(handle: int) -> bool:
    """Take the lock of an open file or directory; False where another process has it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def try_locked(path: Path) -> Iterator[bool]:
    """Try to hold the lock of a file or directory; yield whether no other process has it."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        yield try_lock(handle)
    finally:
        os.close(handle)


def sync(path: Path) -> None:
    """Write a file, or the names in a directory, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
