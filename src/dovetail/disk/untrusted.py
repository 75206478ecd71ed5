"""Files of a model directory, read as untrusted input. No code in the directory is executed.

A name is one plain name, never a path. A link is followed only if it stays inside the directory, or if the directory is a
snapshot of Hugging Face's cache and the link leads to the files of that cache:

    models--owner--name/snapshots/REVISION/config.json -> ../../blobs/HASH

Only regular files of bounded size are opened (a pipe would block). JSON is bounded in depth and in the number of its items
before it is parsed; duplicate keys and NaN are errors.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

from dovetail.base.errors import FileError
from dovetail.base.limits import JSON_BYTES, JSON_DEPTH, JSON_ITEMS, JSON_NUMBER
from dovetail.disk.presets import preset_names

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


class Directory:
    """A directory whose files are opened safely."""

    def __init__(self, place: str | Path) -> None:
        self.place = Path(os.path.abspath(place))
        if not exists(self.place):
            if str(place) in preset_names():
                raise FileError(
                    f"{place}: is a preset, which has no weights; train it first: dovetail train {place} --text FILE -o DIR"
                )
            raise FileError(f"{self.place}: no such directory")
        if self.place.suffix in PICKLES and self.place.is_file():
            raise FileError(pickle_refusal(self.place))
        if not is_directory(self.place):
            raise FileError(f"{self.place}: is not a directory")
        self.root = self.place.resolve()

    def names(self) -> list[str]:
        """Return the names of its entries, sorted."""
        try:
            return sorted(os.listdir(self.root))
        except OSError as error:
            raise FileError(f"{self.place}: cannot be read ({error.strerror})") from error

    def has(self, name: str) -> bool:
        """Whether an entry of this name exists; a link counts, wherever it leads."""
        return os.path.lexists(self.root / name)

    def path(self, name: str) -> Path:
        """Return the path of the real file, or raise FileError."""
        shown = self.place / name
        if name != os.path.basename(name) or name in ("", ".", "..") or "\\" in name or "\0" in name:
            raise FileError(f"{self.place}: {name!r} is a path, not the name of a file in this directory")
        try:
            real = shown.resolve(strict=True)
        except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
            what = "a dangling link" if shown.is_symlink() else "no such file"
            raise FileError(f"{shown}: {what}") from error
        cache = self.root.parent.name == "snapshots" and real.parent == self.root.parent.parent / "blobs"
        if not (real.is_relative_to(self.root) or cache):
            raise FileError(f"{shown}: is a link out of the directory, which is not followed; put the file itself there")
        return real

    def read(self, name: str, largest: int) -> bytes:
        """Return the bytes of a small file."""
        shown, handle = self.place / name, open_regular(self.path(name), self.place / name)
        with os.fdopen(handle, "rb") as file:
            size = os.fstat(handle).st_size
            if size > largest:
                raise FileError(f"{shown}: has {size:,} bytes; the limit is {largest:,}")
            return file.read(largest)

    def text(self, name: str, largest: int) -> str:
        """Return the text of a small UTF-8 file."""
        try:
            return self.read(name, largest).decode("utf-8")
        except UnicodeDecodeError as error:
            raise FileError(f"{self.place / name}: is not UTF-8 ({error.reason} at byte {error.start})") from error

    def json(self, name: str, largest: int = JSON_BYTES) -> dict[str, Any]:
        """Return the JSON object in a file."""
        return parse_object(self.read(name, largest), str(self.place / name))


def exists(path: Path) -> bool:
    """Return whether the path leads to a file or directory; raise FileError where that cannot be known."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:  # a name too long, links in a circle, no permission; NUL or a lone surrogate
        raise FileError(f"{path}: cannot be read ({problem(error)})") from error
    return True


def is_directory(path: Path) -> bool:
    """Return whether the path leads to a directory; raise FileError where that cannot be known."""
    return exists(path) and path.is_dir()


def problem(error: Exception) -> str:
    """Return the message of an operating-system error, without its path and number."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def open_regular(path: Path, shown: Path) -> int:
    """Return a descriptor of a regular file, without blocking or following a link; `shown` is its name in errors."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise FileError(f"{shown}: cannot be read ({error.strerror})") from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise FileError(f"{shown}: is not a regular file")
    return handle


def open_named(path: Path) -> BufferedReader:
    """Open a regular file that a user named; a link is followed."""
    try:
        real = path.resolve(strict=True)
    except (OSError, ValueError, RuntimeError) as error:  # no file, NUL in its name, links in a circle
        raise FileError(f"{path}: cannot be read ({problem(error)})") from error
    return os.fdopen(open_regular(real, path), "rb")


def read_regular(path: Path, largest: int, what: str) -> str:
    """Return the text of a regular UTF-8 file of at most `largest` bytes that a user named; `what` names it in errors."""
    with open_named(path) as file:
        size = os.fstat(file.fileno()).st_size
        data = b"" if size > largest else file.read(largest + 1)
    if max(size, len(data)) > largest:
        raise FileError(f"{path}: has {max(size, len(data)):,} bytes; the limit for {what} is {largest:,}")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        remedy = "convert it, say with `iconv -f latin1 -t utf-8`"
        raise FileError(f"{path}: byte {error.start} is not UTF-8 ({error.reason}); {remedy}") from error


def refuse_pickles(where: Directory) -> None:
    """Raise FileError for the first pickle in a directory that should hold another form."""
    for name in where.names():
        if name.endswith(PICKLES):
            raise FileError(pickle_refusal(where.place / name))


def pickle_refusal(path: Path) -> str:
    """Return the message that refuses a pickle, with a command that converts it.

    The command is a line to paste, so the file's name is an argument quoted for the shell, never part of the code; a name with
    control characters, which a terminal may act on, is left out.
    """
    code = (
        "import sys, torch, safetensors.torch as s; t = torch.load(sys.argv[1], weights_only=True); "
        's.save_file({k: v.clone() for k, v in t.items()}, "model.safetensors")'
    )
    name = shlex.quote(path.name) if path.name.isprintable() else "FILE"
    return (
        f"{path}: is a pickle, which can run code when it is opened, and is not read here; "
        f"where you trust it, convert it to safetensors: python -c '{code}' {name}"
    )


# -- JSON -----------------------------------------------------------------------------------------------------------


def parse_object(data: bytes, where: str) -> dict[str, Any]:
    """Parse a JSON object of bounded size. Infinity is read, since some configs have it; NaN is refused."""
    items = sum(data.count(sign) for sign in b"[{,:")
    if items > JSON_ITEMS:
        raise FileError(f"{where}: holds more than {JSON_ITEMS:,} items")
    try:
        parsed = json.loads(data.decode("utf-8"), object_pairs_hook=_without_duplicates, parse_constant=_constant)
    except RecursionError as error:
        raise FileError(f"{where}: is nested deeper than {JSON_DEPTH} levels") from error
    except ValueError as error:  # not JSON, not UTF-8, or a number of thousands of digits
        raise FileError(f"{where}: is not JSON ({_short(str(error))})") from error
    if not isinstance(parsed, dict):
        raise FileError(f"{where}: is not a JSON object")
    _check_bounds(parsed, where)
    return parsed


def _check_bounds(parsed: dict[str, Any], where: str) -> None:
    """Raise for a value nested too deeply or a number too large; keeps only the path to the current value."""
    stack: list[tuple[str, Iterator[tuple[Any, Any]]]] = [("", iter(parsed.items()))]
    while stack:
        key, value = next(stack[-1][1], (None, None))
        if key is None:
            stack.pop()
        elif isinstance(value, (dict, list)):
            if len(stack) == JSON_DEPTH:
                raise FileError(f"{where}: {_short(_path(stack, key))} is nested deeper than {JSON_DEPTH} levels")
            stack.append((str(key), iter(value.items() if isinstance(value, dict) else enumerate(value))))
        elif isinstance(value, int) and abs(value) > JSON_NUMBER:
            raise FileError(f"{where}: {_short(_path(stack, key))} is {_short(str(value))}; no size or count is beyond 2⁵³")


def _path(stack: list[tuple[str, Any]], key: Any) -> str:
    return ".".join([*(name for name, _ in stack[1:]), str(key)])


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        names: set[str] = set()
        duplicate = next(key for key, _ in pairs if key in names or names.add(key))
        raise ValueError(f"the key {_short(duplicate)!r} is given twice")
    return data


def _constant(word: str) -> float:
    if word == "NaN":
        raise ValueError("NaN is not a number")
    return math.inf if word == "Infinity" else -math.inf


def _short(text: str) -> str:
    return text if len(text) <= 120 else f"{text[:117]}…"
