"""One line on stderr and one exit code for every exception that ends a verb.

    1          a law fails, or two implementations differ
    2 3 4 5    usage, spec, data or file, diverged: errors that a user can cause and mend (base/errors.py)
    70         an internal error: a defect of Dovetail, as EX_SOFTWARE of sysexits.h
    130 143    ended by SIGINT or SIGTERM: 128 + the signal, as shells report it

A script can therefore tell a verdict (0 or 1) from every failure to reach one. The traceback of an internal error is written to
a file, whose name the line gives; DOVETAIL_DEBUG=1 prints the traceback of any error on stderr instead.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from typing import Any

from dovetail.base.errors import DovetailError, printable
from dovetail.base.termination import Terminated

DATA, INTERNAL = 4, 70  # exit codes
DEBUG, SAFE_PATH = "DOVETAIL_DEBUG", "PYTHONSAFEPATH"
LONGEST = 3000  # characters of the line
ALLOCATION = ("can't allocate memory", "not enough memory", "bad_alloc", "out of memory")  # torch raises RuntimeError
ADVICE = "choose a smaller model, batch or length"


def report(error: BaseException) -> int:
    """Print the error as one line on stderr; return the exit code."""
    line, code = describe(error)
    if os.environ.get(DEBUG, "0") not in ("", "0"):
        _print("".join(traceback.format_exception(error)).rstrip(), keep="\n")
    elif code == INTERNAL:
        line += f"; please report it with the traceback in {_written(error)}"
    _print(f"dovetail: {_shortened(line)}")
    return code


def describe(error: BaseException) -> tuple[str, int]:
    """Return the line that reports an error, and its exit code."""
    if isinstance(error, DovetailError):
        return str(error), error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", 128 + signal.SIGINT
    if isinstance(error, Terminated):
        return "terminated", 128 + signal.SIGTERM
    if isinstance(error, OSError):
        return _of_system(error), DATA
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _mentions(error, ALLOCATION)):
        return f"not enough memory; {ADVICE}", DATA
    if isinstance(error, RecursionError):
        return "the input is nested too deeply", DATA
    where = traceback.extract_tb(error.__traceback__)
    place = f" at {os.path.basename(where[-1].filename)}:{where[-1].lineno}" if where else ""
    return f"internal error{place}: {type(error).__name__}: {error}", INTERNAL


def _shortened(line: str) -> str:
    """Return a line of bounded length: the middle of a longer one is left out, since the problem often stands at its end."""
    return line if len(line) <= LONGEST else f"{line[: LONGEST // 2]} … {line[-LONGEST // 2 :]}"


def _of_system(error: OSError) -> str:
    """Return `path: problem` of an error of the operating system."""
    names = [os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, (str, bytes))]
    problem = error.strerror or str(error) or type(error).__name__
    return ": ".join([*names[:1], problem])


def _mentions(error: BaseException, phrases: tuple[str, ...]) -> bool:
    return any(phrase in str(error) for phrase in phrases)


def _written(error: BaseException) -> str:
    """Write the traceback to a new file; return its path."""
    try:
        handle, path = tempfile.mkstemp(prefix="dovetail-traceback-", suffix=".txt")
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write("".join(traceback.format_exception(error)))
    except OSError:  # a full or read-only disk
        return f"no file, since none can be written: set {DEBUG}=1 to print it"
    return path


def _print(line: str, keep: str = "") -> None:
    with contextlib.suppress(OSError):  # stderr is closed
        print(printable(line, None, keep), file=sys.stderr, flush=True)


# -- warnings and streams ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """A warning is one line on stderr; a character that the terminal cannot show is an escape; no Python process that is
    started from here, by whatever library, imports from the working directory."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):  # another object in place of a stream, or a closed one
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    safe_path = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"  # spawned workers begin with `python -c`, which searches the working directory first
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            yield
    finally:
        if safe_path is None:
            del os.environ[SAFE_PATH]
        else:
            os.environ[SAFE_PATH] = safe_path


def _show_warning(message: Warning | str, category: type[Warning], filename: str, lineno: int, *rest: Any) -> None:
    _print(f"dovetail: warning: {printable(str(message), LONGEST)}")


def close_stdout() -> None:
    """Discard what is left to print, where nothing reads stdout or its disk is full."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
