"""Replace a directory as a whole: a reader sees the old one or the new one, never a mixture, whatever is killed or runs at
once.

    with replacing("out", check) as fresh:      # .out.PID-RANDOM.tmp, beside out
        (fresh / "file").write_bytes(...)
    # on leaving: synced to disk and swapped with out; the old directory is deleted

The swap is one system call (renameat2 with RENAME_EXCHANGE) where the file system has it, else two renames; it happens under a
lock on the parent directory. Every writer has a temporary directory of its own, which it locks, so two writers never meet in
one. What a killed writer leaves behind is deleted by the next one. A symbolic link is followed first: the directory it points
to is replaced.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from dovetail.base.errors import FileError
from dovetail.disk.atomic import sync, temporary_path, temporary_paths, try_lock, try_locked

LEFTOVER_AGE = 3600.0  # seconds after which an unlocked temporary directory is deleted even if a process has its writer's id
LOCK_TIMEOUT = 60.0  # seconds to wait for another writer's swap, which takes milliseconds
NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM)  # the kernel or the file system cannot do it


@contextlib.contextmanager
def replacing(directory: str | Path, check: Callable[[Path], None]) -> Iterator[Path]:
    """Yield an empty directory to fill; on leaving, put it in the place of `directory` as a whole.

    `check` is called with the existing directory, before and again under the lock, and raises if it must not be replaced. After
    an error nothing has changed.
    """
    target = _resolved(directory)
    if os.path.lexists(target):
        check(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _delete_leftovers(target)
        fresh, lock = _make_temporary(target)
    except OSError as error:
        raise FileError(f"{target}: cannot be written ({error})") from error
    try:
        yield fresh
        _sync_tree(fresh)
        _swap(fresh, target, check)
    except OSError as error:
        raise FileError(f"{target}: cannot be written ({error})") from error
    finally:
        os.close(lock)
        shutil.rmtree(fresh, ignore_errors=True)  # after a swap this name holds the old directory


def set_aside(directory: str | Path) -> Path | None:
    """Return the directory that a replacement by two renames had set aside when it was killed between them, if there is one."""
    target = _resolved(directory)
    if os.path.lexists(target):
        return None
    return next((path for path in _temporaries(target) if path.suffix == ".old"), None)


# -- the swap ---------------------------------------------------------------------------------------------------------


def _swap(fresh: Path, target: Path, check: Callable[[Path], None]) -> None:
    with _locked(target.parent):
        if not os.path.lexists(target):
            os.rename(fresh, target)
        else:
            check(target)
            if not _exchange(fresh, target):
                _rename_twice(fresh, target)
        sync(target.parent)


def _exchange(one: Path, two: Path) -> bool:
    """Exchange two paths in one system call; return False where that is not possible."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    at_cwd, exchange = -100, 2
    if renameat2(at_cwd, os.fsencode(one), at_cwd, os.fsencode(two), exchange) == 0:
        return True
    code = ctypes.get_errno()
    if code in NO_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), str(two))


def _rename_twice(fresh: Path, target: Path) -> None:
    """Set the old directory aside, then rename the new one; afterwards the old one has the name of `fresh`."""
    aside = fresh.with_suffix(".old")
    os.rename(target, aside)
    try:
        os.rename(fresh, target)
    except BaseException:
        os.rename(aside, target)
        raise
    os.rename(aside, fresh)


# -- locks and leftovers ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + LOCK_TIMEOUT
        while not try_lock(handle):
            if time.monotonic() > deadline:
                raise FileError(f"{directory}: locked by another process for {LOCK_TIMEOUT:.0f} s; try again")
            time.sleep(0.005)
        yield
    finally:
        os.close(handle)


def _make_temporary(target: Path) -> tuple[Path, int]:
    """A new directory beside the target, and a handle that holds its lock while this process lives."""
    while True:
        fresh = temporary_path(target)
        with contextlib.suppress(FileExistsError):
            os.mkdir(fresh)
            lock = os.open(fresh, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(lock, fcntl.LOCK_EX)  # at most another writer looks at it for a moment
            return fresh, lock


def _temporaries(target: Path) -> Iterator[Path]:
    """The temporary directories of writers of this target."""
    return (path for path in temporary_paths(target) if path.is_dir() and not path.is_symlink())


def _delete_leftovers(target: Path) -> None:
    """Delete what killed writers of this target left behind. A directory that was set aside stays while the target is
    missing."""
    for path in _temporaries(target):
        if path.suffix == ".old" and not os.path.lexists(target):
            continue
        with contextlib.suppress(OSError), try_locked(path) as locked:  # another writer may delete it at the same time
            if locked and (_writer_is_dead(path) or time.time() - path.lstat().st_mtime > LEFTOVER_AGE):
                shutil.rmtree(path, ignore_errors=True)


def _writer_is_dead(path: Path) -> bool:
    pid = int(path.stem.rpartition(".")[2].partition("-")[0])
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:
        return False
    return False


# -- paths and syncs --------------------------------------------------------------------------------------------------


def _resolved(directory: str | Path) -> Path:
    try:
        return Path(directory).resolve()
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        raise FileError(f"{directory}: cannot be resolved ({error})") from error


def _sync_tree(directory: Path) -> None:
    for path in directory.iterdir():
        if not path.is_symlink() and (path.is_file() or path.is_dir()):  # opening a pipe would wait for its other end
            sync(path)
    sync(directory)
