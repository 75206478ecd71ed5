"""A run file: the arguments of a function as YAML. Its parameters are the keys, its annotations their types.

    run: 1                             or the key `spec` alone: what makes a YAML file a run file
    spec: llama-tiny                   a preset, a path, or a spec written out
    data: [stories]
    tokens: 200M
    swap: [position=alibi]

Arguments of the call override keys. `set` and `swap` of the call change the spec after those of the file, and `--set run.KEY=…`
sets a key. Paths are relative to the working directory, as those of flags are.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from dovetail.api.arguments import Changes, read_spec
from dovetail.base.errors import FileError, UsageError, names_or_nearest
from dovetail.base.option import Parameter, parameters
from dovetail.base.option_group import grouped, ungrouped
from dovetail.disk.model_files import SPEC_FILE
from dovetail.disk.yaml import parse_yaml, read_text
from dovetail.training.settings import mapping_of

P = ParamSpec("P")
R = TypeVar("R")
PREFIX = "run."  # of a --set that means a key of the run file
SPEC_KEYS = ("spec", "set", "swap")
IN_CALLS_ONLY = ("note",)
Parameters = Mapping[str, Parameter]  # by key


def accepts_run_file(function: Callable[P, R]) -> Callable[P, R]:
    """Let the first argument of a function, its `spec`, be a run file."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        named = {name: value for name, value in kwargs.items() if name in signature.parameters}
        given = {**signature.bind_partial(*args, **named).arguments, **kwargs}
        return typing.cast(Callable[..., R], function)(**_arguments_of(function, given))

    return call


def complete_arguments(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return every argument of a function that accepts run files: those of the call, of its run file, and defaults."""
    bound = inspect.signature(function).bind(**_arguments_of(function, arguments))
    bound.apply_defaults()
    return dict(bound.arguments)


def _arguments_of(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    known = {option.key: option for name, option in parameters(function).items() if name not in IN_CALLS_ONLY}
    return grouped(function, _merged(ungrouped(arguments), known))


def find_run_file(spec: object) -> dict[str, Any] | None:
    """Return the content of a run file, or of a mapping that is one; None where the spec is something else."""
    if isinstance(spec, Mapping):
        data: Any = dict(typing.cast(Mapping[str, Any], spec))
    elif isinstance(spec, (str, Path)) and Path(spec).suffix in (".yaml", ".yml") and Path(spec).is_file():
        data = parse_yaml(read_text(Path(spec)), str(spec))
    else:
        return None
    return mapping_of(data, Path("run")) if isinstance(data, dict) and {"run", "spec"} & data.keys() else None


def default_out(spec: str | None, start: Path | None) -> Path | None:
    """Return the directory that a run on the command line is written to without -o: that of a run whose run.yaml is given, else
    a name after the spec; None where the run file has an `out`."""
    data = find_run_file(spec)
    if data is not None and "out" in data:
        return None
    path = Path(spec if spec is not None else start or "model").absolute()
    return path.parent if data is not None and (path.parent / SPEC_FILE).is_file() else Path(f"{path.stem}-trained")


def _merged(given: Mapping[str, Any], known: Parameters) -> dict[str, Any]:
    """Return the arguments of the call with the keys of its run file, where it has one."""
    merged = dict(given)
    if "set" in given:
        merged["set"], keys = _split(given["set"])
        merged |= _arguments(keys, {key: one for key, one in known.items() if key not in SPEC_KEYS}, "--set run")
    data = find_run_file(merged.get("spec"))
    if data is None:
        return merged
    spec = merged.pop("spec")
    where = str(spec) if isinstance(spec, (str, Path)) else "run"
    data.pop("run", None)
    file = _arguments(data, known, where)
    if "spec" in file:
        named = read_spec(file["spec"])
        named = named._replace(name=where) if isinstance(file["spec"], Mapping) else named
        file["spec"] = named.after(file.pop("set", ()), file.pop("swap", ()))
    return {**file, **merged}


def _split(changes: Changes) -> tuple[Changes, dict[str, Any]]:
    """Separate changes of the spec from those of keys, `run.KEY=VALUE`."""
    from dovetail.files.spec import assignments

    if isinstance(changes, Mapping):
        changes = typing.cast(Mapping[str, Any], changes)
        keys = {where: value for where, value in changes.items() if where.startswith(PREFIX)}
        return {where: value for where, value in changes.items() if where not in keys}, _unprefixed(keys.items())
    texts = [changes] if isinstance(changes, str) else list(changes)
    keys = [text for text in texts if text.startswith(PREFIX)]
    return [text for text in texts if not text.startswith(PREFIX)], _unprefixed(assignments(keys, "--set"))


def _unprefixed(keys: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    return {where.removeprefix(PREFIX): value for where, value in keys}


def _arguments(keys: Mapping[str, Any], known: Parameters, where: str) -> dict[str, Any]:
    """Return the arguments that keys mean. Raises for a key that does not exist, and for a value of another type."""
    result: dict[str, Any] = {}
    for key, value in keys.items():
        at, error = (f"{where}.{key}", UsageError) if where.startswith("--") else (f"{where}: {key}", FileError)
        if key not in known:
            raise error(f"{at[:200]}: is not a key of a run; {names_or_nearest(str(key), known, 'keys')}")
        if (problem := known[key].problem(value)) is not None:
            raise error(f"{at}: {problem}")
        result[known[key].name] = value
    return result
