"""Run Python code that the user names: `file.py:factory`, `package.module:factory`, or a file written by `dovetail emit`.

The file runs in this process, as the user asked by naming it. An exception in it, and a call of `sys.exit`, become errors that
name the side: no exit code of the file's own can pass for a verdict. `os._exit` and a crash of the interpreter end this process
with no verdict printed.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dovetail.base.errors import DovetailError, FileError
from dovetail.base.extensions import import_named


@contextmanager
def exits_refused(label: str) -> Iterator[None]:
    """Turn `sys.exit` in the code inside into an error of this side."""
    try:
        yield
    except SystemExit as stop:
        raise FileError(f"{label}: its code called sys.exit({stop.code!r}); there is no verdict") from stop


@contextmanager
def errors_named(label: str) -> Iterator[None]:
    """Turn every exception of the code inside, and `sys.exit`, into an error of this side."""
    with exits_refused(label):
        try:
            yield
        except DovetailError:
            raise
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            raise FileError(f"{label}: {first_line(error)} ({frame.filename}, line {frame.lineno})") from error


def first_line(error: Exception | None, most: int = 300) -> str:
    """The type of an error and the first line of its message, at most `most` characters."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:most] if str(error).strip() else ''}"


def factory_of(text: str, usage: str) -> Callable[[], Any]:
    """The function that `file.py:factory` or `package.module:factory` names; `usage` is the error for any other form."""
    name, _, function = text.rpartition(":")
    if not name or not function.isidentifier():
        raise FileError(usage)
    dotted = not name.endswith(".py") and all(word.isidentifier() for word in name.split("."))
    factory = vars(_imported(name) if dotted else import_file(Path(name))).get(function)
    if not callable(factory):
        raise FileError(f"{name}: has no function called {function}")

    @functools.wraps(factory)
    def guarded() -> Any:
        with exits_refused(text):
            return factory()

    return guarded


def _imported(name: str) -> Any:
    with errors_named(name):
        return import_named(name)


def import_file(file: Path) -> Any:
    """Import a Python file as a module."""
    if not file.is_file():
        raise FileError(f"{file}: no such file")
    spec = importlib.util.spec_from_file_location(f"verified_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise FileError(f"{file}: is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their own module
    with errors_named(str(file)):
        spec.loader.exec_module(module)
    return module
