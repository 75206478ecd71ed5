"""Code of a user's own: run a Python file, or import a module, that the command names.

A package that is installed offers its parts by the entry point `dovetail.parts`. `load_parts` is for those that are not
installed: `--load mine.py`, `--load package.module`. The names are remembered, and processes that we start (ranks, workers of
the law suite) load them, too. Only a user's command names code; a spec or a model directory never does.

The directory of that code is searched last, and only while the code is loaded: a stray torch.py beside it is never imported.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

from dovetail.base.errors import FileError

_LOADED: dict[str, None] = {}


def loaded() -> tuple[str, ...]:
    """Return the files and modules that this process has loaded, as absolute paths and module names."""
    return tuple(_LOADED)


def load_parts(names: Iterable[str]) -> None:
    """Run each Python file, or import each module; modules of the working directory are found. Each is loaded once."""
    for name in names:
        source = os.path.abspath(name) if _is_file(name) else name
        if source in _LOADED:
            continue
        try:
            _run_file(Path(source)) if _is_file(name) else import_named(source)
        except FileError:
            raise
        except (Exception, SystemExit) as error:  # code of a user may raise anything
            if isinstance(error, ModuleNotFoundError) and name.split(".")[0] == error.name:
                raise FileError(f"--load {name}: no such module; give FILE.py, or a module that Python can import") from error
            raise FileError(f"--load {name}: {type(error).__name__}: {error}") from error
        _LOADED[source] = None


def _is_file(name: str) -> bool:
    return name.endswith(".py") or os.sep in name


def import_named(name: str) -> ModuleType:
    """Import a module by its dotted name, an installed one or one of the working directory; FileError if there are both."""
    here, top = os.getcwd(), name.partition(".")[0]
    local = PathFinder.find_spec(top, [here])
    installed = sys.modules[top].__spec__ if top in sys.modules else importlib.util.find_spec(top)
    if local is not None and local.origin is not None and installed is not None and installed.origin != local.origin:
        where = f"installed ({installed.origin}), and the working directory has {local.origin}"
        raise FileError(f"{name}: is {where}; name the file instead, or run in another directory")
    with _searched(here):
        return importlib.import_module(name)


@contextmanager
def _searched(directory: str) -> Iterator[None]:
    """Within this context modules are also found in the directory, after all others."""
    if directory in sys.path:
        yield
        return
    sys.path.append(directory)
    try:
        yield
    finally:
        sys.path.remove(directory)


def _run_file(path: Path) -> None:
    """Run a file as the module of its name, so that another process can import what it defines."""
    if not path.is_file():
        raise FileError(f"--load {path}: no such file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise FileError(f"--load {path}: is not a Python file")
    if getattr(sys.modules.get(path.stem), "__file__", str(path)) != str(path):
        raise FileError(f"--load {path}: a module {path.stem!r} exists already; rename the file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        with _searched(str(path.parent)):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]
        raise
