"""Flags of the verbs: types with a placeholder for the help (SPEC, DIR, FILE, N), and flags that several verbs share.

A verb declares its flags as fields of a dataclass; `declared` adds to each what tyro needs to parse it and to show it: one
placeholder instead of the Python type, and the default only where it says something.
"""

from __future__ import annotations

import dataclasses as dc
import shlex
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import tyro

from dovetail.cli.checks import check_directory, check_file, check_output, check_path, check_spec
from dovetail.core.count import read_count
from dovetail.core.dtypes import dtype_name
from dovetail.core.errors import SpecError
from dovetail.core.limits import MAX_BATCH, MAX_LENGTH, MAX_NEW_TOKENS, MAX_RANKS, MAX_SEED, MAX_STEPS
from dovetail.disk.atomic import check_free

ArgConfig: Any = type(tyro.conf.arg())
POSITIONAL: Any = get_args(tyro.conf.Positional[int])[1]


def _dtype(text: str) -> str:
    try:
        return dtype_name(text)
    except SpecError as error:
        raise ValueError(f"{error.problem}; {error.remedy}") from None


def _run_dtype(text: str) -> str:
    if (name := _dtype(text)) == "float8":
        raise ValueError(f"{text} is a dtype only for weights; run in bfloat16 or wider")
    return name


def _whole(text: str) -> int:
    if text.strip().lstrip("+-").isdigit() and len(text) <= 40:
        return int(text)
    raise ValueError(f"{text[:40]!r} is not a whole number")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text[:40]!r} is not a number") from None


PARSERS: dict[type, tuple[str, Callable[[str], Any]]] = {
    int: ("N", _whole),
    float: ("X", _number),
    str: ("TEXT", str),
    Path: ("PATH", Path),
}


def parsed_by(metavar: str, parse: Callable[[str], Any]) -> Any:
    """Return the annotation of a flag with one value, read by a function that raises ValueError."""
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda words: parse(words[0]),
        is_instance=lambda value: True,
        str_from_instance=lambda value: [str(value)],
    )


@dc.dataclass(frozen=True)
class Check:
    """A check of a flag's value, made after parsing and before torch is imported."""

    check: Callable[[Any], None]


NEW = object()  # the annotation of a path at which nothing may be, unless --force


def whole(low: int, high: int) -> Any:
    """Return the annotation of a whole number from `low` to `high`."""

    def parse(text: str) -> int:
        if not low <= (number := _whole(text)) <= high:
            raise ValueError(f"{number} is not from {low:,} to {high:,}")
        return number

    return parsed_by("N", parse)


def number(low: float, high: float, *, above: bool = False) -> Any:
    """Return the annotation of a finite number from `low` to `high`; with `above`, greater than `low`."""

    def parse(text: str) -> float:
        value = _number(text)
        if not low <= value <= high or (above and value == low):
            raise ValueError(f"{text[:40]} is not {'above' if above else 'from'} {low:g}{', up' if above else ''} to {high:g}")
        return value

    return parsed_by("X", parse)


Spec = Annotated[str, parsed_by("SPEC", str), Check(check_spec)]  # a preset's name, a .yaml file or a model directory
InDir = Annotated[Path, parsed_by("DIR", Path), Check(check_directory)]
OutDir = Annotated[Path, parsed_by("DIR", Path), Check(check_output)]
InFile = Annotated[Path, parsed_by("FILE", Path), Check(check_file)]
InPath = Annotated[Path, parsed_by("PATH", Path), Check(check_path)]  # a directory or a regular file
OutFile = Annotated[Path, parsed_by("FILE", Path), Check(check_output), NEW]  # of a verb with --force
BatchSize = Annotated[int, whole(1, MAX_BATCH)]
Length = Annotated[int, whole(1, MAX_LENGTH)]
Ranks = Annotated[int, whole(1, MAX_RANKS)]
Steps = Annotated[int, whole(1, MAX_STEPS)]
Seed = Annotated[int, whole(0, MAX_SEED)]
NewTokens = Annotated[int, whole(1, MAX_NEW_TOKENS)]
SampleTokens = Annotated[int, whole(0, MAX_NEW_TOKENS)]
Count = Annotated[float, parsed_by("N", read_count)]  # 200M, 2e8
Dtype = Annotated[str, parsed_by("DTYPE", _dtype)]  # torch's name
RunDtype = Annotated[str, parsed_by("DTYPE", _run_dtype)]  # one that a model computes in


Sets = Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="PATH=VALUE")]
Swaps = Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="GROUP=KIND")]
Loads = Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="FILE.py|MODULE")]


@dc.dataclass(kw_only=True)
class LoadFlags:
    """The flag of every verb that reads a spec; the modules are loaded before the verb runs."""

    load: Loads = ()
    """Run a Python file, or import a module, that registers parts of your own; may be given many times."""


@dc.dataclass(kw_only=True)
class FileFlags(LoadFlags):
    """The flag of every verb that writes a file."""

    force: bool = False
    """Replace an existing file."""


@dc.dataclass(kw_only=True)
class SamplingFlags(LoadFlags):
    """The flags of every verb that generates text."""

    temperature: float = 0.0
    """0 picks the most probable token; 1 samples from the model's probs as they are."""
    top_p: float = 1.0
    """Sample from the fewest tokens whose probs sum to this."""
    top_k: int | None = None
    """Sample from the N most probable tokens."""
    min_p: float = 0.0
    """Sample from the tokens that are at least this many times as probable as the most probable one."""
    repetition_penalty: float = 1.0
    """Above 1, tokens of the prompt and of the text so far become less probable."""
    seed: Seed = 0
    """The seed of the sampling."""


class Overrides:
    """A verb whose flags override the keys of a file: `given` are the fields that the command line names."""

    given: frozenset[str] = frozenset()


def declared(command: type) -> type:
    """Complete the annotations of a verb's flags for tyro; return the class."""
    hints = typing.get_type_hints(command, include_extras=True)
    fields = command.__dataclass_fields__
    for name in [name for name in fields if name not in command.__annotations__]:
        fields[name] = fields.pop(name)  # inherited flags come last in the help
    for field in dc.fields(command):
        command.__annotations__[field.name] = _complete(hints[field.name], field)
    return command


def check_values(command: Any) -> None:
    """Raise for a path or a spec name that cannot be right."""
    for field in dc.fields(command):
        _, extras = unwrapped(typing.get_type_hints(type(command), include_extras=True)[field.name])
        value = getattr(command, field.name)
        for extra in extras:
            if isinstance(extra, Check) and value is not None:
                extra.check(value)
            if extra is NEW and value is not None:
                check_free(value, command.force)


def takes_spec(command: type) -> bool:
    """Return whether a flag of the verb is a spec, which may be a preset's name."""
    hints = typing.get_type_hints(command, include_extras=True).values()
    return any(extra == Check(check_spec) for hint in hints for extra in unwrapped(hint)[1])


def flag_names(command: type) -> list[str]:
    """Return the flags that a verb takes, as they are written."""
    return ["--help", *(flag for flags in _flags(command).values() for flag in flags)]


def given_fields(command: type, args: list[str]) -> frozenset[str]:
    """Return the fields of a verb whose flags are on the command line."""
    words = args[: args.index("--")] if "--" in args else args
    written = {word.partition("=")[0].replace("_", "-") for word in words}
    return frozenset(name for name, flags in _flags(command).items() if written & set(flags))


def _flags(command: type) -> dict[str, list[str]]:
    """The flags of each field, as they are written; a positional argument has none."""
    found: dict[str, list[str]] = {}
    for field in dc.fields(command):
        _, extras = _split(typing.get_type_hints(command, include_extras=True)[field.name])
        config = next((one for one in extras if isinstance(one, ArgConfig)), None)
        flag = (config.name if config is not None and config.name else field.name).replace("_", "-")
        if POSITIONAL not in extras:
            names = [f"--{flag}", f"--no-{flag}"] if field.default is True else [f"--{flag}"]
            found[field.name] = [*names, *(config.aliases or () if config is not None else ())]
    return found


def _complete(hint: Any, field: dc.Field[Any]) -> Any:
    base, extras = unwrapped(hint)
    config: Any = next((one for one in extras if isinstance(one, ArgConfig)), tyro.conf.arg())
    others = [one for one in extras if not isinstance(one, ArgConfig)]
    if config.help_behavior_hint is None:
        config = dc.replace(config, help_behavior_hint=_behavior(field))
    if field.default is False:
        others.append(tyro.conf.FlagCreatePairsOff)  # --json, without --no-json
    if any(isinstance(one, tyro.constructors.PrimitiveConstructorSpec) for one in others):
        return Annotated[base, *others, config]
    options = [option for option in _options(base) if option is not type(None)]
    if len(options) == 1 and options[0] in PARSERS:
        others.append(parsed_by(*PARSERS[options[0]]))
    elif len(options) == 1 and get_origin(options[0]) is Literal:
        others.append(_choice(get_args(options[0])))
    elif get_origin(base) is tuple and config.metavar is None:
        item = get_args(base)[0]
        config = dc.replace(config, metavar="|".join(get_args(item)) if get_origin(item) is Literal else PARSERS[item][0])
    return Annotated[base, *others, config]


def _choice(choices: tuple[str, ...]) -> Any:
    def parse(text: str) -> str:
        from dovetail.core.suggest import names_or_nearest

        if text in choices:
            return text
        raise ValueError(f"{text[:40]!r} is none of its values; {names_or_nearest(text, choices, 'values')}")

    return parsed_by("|".join(choices), parse)


def _behavior(field: dc.Field[Any]) -> str:
    """Return what the help says behind a flag's description: its default, where there is one worth saying."""
    if isinstance(field.default, bool) or not isinstance(field.default, (int, float, str, Path)):
        return ""
    return f"(default: {shlex.quote(field.default) if isinstance(field.default, str) else field.default})"


def _split(hint: Any) -> tuple[Any, list[Any]]:
    return (hint.__origin__, list(hint.__metadata__)) if get_origin(hint) is Annotated else (hint, [])


def unwrapped(hint: Any) -> tuple[Any, list[Any]]:
    """Return the type and all annotations of a hint, those inside `X | None`, too."""
    base, extras = _split(hint)
    inner = [_split(option)[1] for option in _options(base)]
    return base, [*extras, *(extra for some in inner for extra in some)]


def _options(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
