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

DTYPES = {  # the names of torch, and the short ones
    "float64": ("fp64", "f64", "double"),
    "float32": ("fp32", "f32", "float"),
    "bfloat16": ("bf16",),
    "float16": ("fp16", "f16", "half"),
    "float8": ("fp8", "f8"),
}
ArgConfig: Any = type(tyro.conf.arg())
POSITIONAL: Any = get_args(tyro.conf.Positional[int])[1]


def dtype_name(text: str) -> str:
    """Return torch's name of a dtype that is given by it or by a short one: bf16 is bfloat16."""
    for name, short in DTYPES.items():
        if text.removeprefix("torch.").lower() in (name, *short):
            return name
    raise ValueError(f"{text[:40]!r} is not a dtype: {', '.join(DTYPES)}")


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


Spec = Annotated[str, parsed_by("SPEC", str)]  # a preset's name, a .yaml file or a model directory
Dir = Annotated[Path, parsed_by("DIR", Path)]
File = Annotated[Path, parsed_by("FILE", Path)]
Dtype = Annotated[str, parsed_by("DTYPE", dtype_name)]  # torch's name


@dc.dataclass(kw_only=True)
class LoadFlags:
    """The flag of parts that are not installed."""

    load: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="FILE.py|MODULE")] = ()
    """Run a Python file, or import a module, that registers parts of your own; may be given many times."""


@dc.dataclass(kw_only=True)
class ChangeFlags(LoadFlags):
    """The flags that change a spec."""

    set: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="PATH=VALUE")] = ()
    """Set a field: --set layers.*.mixer.kv_heads=1; may be given many times."""
    swap: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="GROUP=KIND")] = ()
    """Swap a part in every layer: --swap position=alibi; may be given many times, applied before --set."""


def declared(command: type) -> type:
    """Complete the annotations of a verb's flags for tyro; return the class."""
    hints = typing.get_type_hints(command, include_extras=True)
    for field in dc.fields(command):
        command.__annotations__[field.name] = _complete(hints[field.name], field)
    return command


def flag_names(command: type) -> list[str]:
    """Return the flags that a verb takes, as they are written."""
    names = ["--help"]
    for field in dc.fields(command):
        _, extras = _split(typing.get_type_hints(command, include_extras=True)[field.name])
        flag = field.name.replace("_", "-")
        config = next((one for one in extras if isinstance(one, ArgConfig)), None)
        if POSITIONAL not in extras:
            names += [f"--{flag}", f"--no-{flag}"] if field.default is True else [f"--{flag}"]
            names += config.aliases or () if config is not None else ()
    return names


def _complete(hint: Any, field: dc.Field[Any]) -> Any:
    base, extras = _split(hint)
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
        config = dc.replace(config, metavar=PARSERS[get_args(base)[0]][0])
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


def _options(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
