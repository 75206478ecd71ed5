"""Parts of a user's own: run a Python file, or import a module, that registers them.

A package that is installed offers its parts by the entry point `dovetail.parts`. This is for those that are not installed:
`--load mine.py`, `--load package.module`. The names are remembered, and processes that we start (ranks, workers of the law
suite) load them, too. Only a user's command names code; a spec or a model directory never does.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from dovetail.core.errors import FileError

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
        _search(os.path.dirname(source) if _is_file(name) else os.getcwd())
        try:
            _run_file(Path(source)) if _is_file(name) else importlib.import_module(source)
        except FileError:
            raise
        except (Exception, SystemExit) as error:  # code of a user may raise anything
            if isinstance(error, ModuleNotFoundError) and name.split(".")[0] == error.name:
                raise FileError(f"--load {name}: no such module; give FILE.py, or a module that Python can import") from error
            raise FileError(f"--load {name}: {type(error).__name__}: {error}") from error
        _LOADED[source] = None


def _is_file(name: str) -> bool:
    return name.endswith(".py") or os.sep in name


def _search(directory: str) -> None:
    if directory not in sys.path:
        sys.path.insert(0, directory)


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
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]
        raise
