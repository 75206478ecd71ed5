"""Option: what a parameter of a public function says about itself, once, in its annotation.

    def show(spec: …, *, length: Annotated[int | None, Option("Tokens per sequence.", low=1, high=MAX_LENGTH)] = None): …

The flag, its line of help, the key of a run file, completion and the check of the value follow from it. A call from Python is
checked by `checks_options`, and its errors are written by `names_options`: messages name an option as the command line does,
`--length`, and a call as `length`.
"""

from __future__ import annotations

import builtins
import dataclasses as dc
import functools
import inspect
import math
import re
import sys
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple, ParamSpec, TypeVar, get_args, get_origin

from dovetail.core.errors import DovetailError, UsageError
from dovetail.core.option_group import OptionGroup, ungrouped

P = ParamSpec("P")
R = TypeVar("R")
FLAG = re.compile(r"(?<![\w-])--?(no-)?([a-z][a-z-]*)")  # in a message


@dc.dataclass(frozen=True)
class Option:
    """A line of help, the bounds of a number, and how the command line writes and reads the value."""

    help: str
    low: float = -math.inf
    high: float = math.inf
    above: bool = False  # whether the value must be greater than `low`
    form: str = ""  # the placeholder of the value in a help: DIR; by default that of the type
    read: Callable[[str], Any] | None = None  # the value of a text, or ValueError; by default that of the type
    check: Callable[[Any], None] | None = None  # of a value on the command line, before torch is imported
    short: str | None = None  # -o
    repeat: bool = False  # given many times, instead of many values after one flag
    argument: bool = False  # a positional argument instead of a flag
    new: bool = False  # a path at which nothing may be, unless `force`

    def problem(self, value: Any) -> str | None:
        """Return what is wrong with a number; None if it is within the bounds."""
        unbounded = math.isinf(self.low) and math.isinf(self.high)
        if unbounded or isinstance(value, bool) or not isinstance(value, int | float):
            return None
        if self.low <= value <= self.high and not (self.above and value == self.low):
            return None
        low, high = (f"{bound:,}" if isinstance(bound, int) else f"{bound:g}" for bound in (self.low, self.high))
        shown = f"{value:,}" if isinstance(value, int) else f"{value:g}"
        return f"{shown} is not above {low}, up to {high}" if self.above else f"{shown} is not from {low} to {high}"


class Parameter(NamedTuple):
    """A parameter of a function: its name, its type, its option and its default."""

    name: str
    hint: Any
    option: Option
    default: Any = inspect.Parameter.empty
    variadic: bool = False

    @property
    def required(self) -> bool:
        """Whether a call must have it."""
        return self.default is inspect.Parameter.empty and not self.variadic

    @property
    def key(self) -> str:
        """The key of a run file: `from` for `from_`."""
        return self.name.rstrip("_")


def parameters(function: Callable[..., Any]) -> dict[str, Parameter]:
    """Return the parameters of a function by name, those without an option too, and the fields of each group in its place."""
    hints = _hints(function)
    found: dict[str, Parameter] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if isinstance(group := parameter.default, OptionGroup):
            known = _hints(type(group))
            found |= {field: Parameter(field, *_split(known[field]), value) for field, value in vars(group).items()}
        else:
            hint, option = _split(hints.get(name, Any))
            found[name] = Parameter(name, hint, option, parameter.default, parameter.kind is parameter.VAR_POSITIONAL)
    return found


def declared(function: Callable[..., Any]) -> dict[str, Parameter]:
    """Return the parameters that are options, by name."""
    return {name: parameter for name, parameter in parameters(function).items() if parameter.option.help}


def checks_options(function: Callable[P, R]) -> Callable[P, R]:
    """Raise UsageError for a number that is outside the bounds of its parameter."""

    @functools.cache
    def options() -> dict[str, Option]:
        return {name: parameter.option for name, parameter in parameters(function).items()}

    @functools.wraps(function)
    def call(*args: P.args, **keywords: P.kwargs) -> R:
        for name, value in ungrouped({**dict(zip(options(), args, strict=False)), **keywords}).items():
            if name in options() and (problem := options()[name].problem(value)) is not None:
                raise UsageError(f"{name}: {problem}")
        return function(*args, **keywords)

    return call


def names_options(function: Callable[P, R]) -> Callable[P, R]:
    """Write the options that an error names as a call does: `held_out` for --held-out, `force=True` for --force."""

    @functools.wraps(function)
    def call(*args: P.args, **keywords: P.kwargs) -> R:
        try:
            return function(*args, **keywords)
        except DovetailError as error:
            error.args = (in_python(str(error), function),)
            raise

    return call


def in_python(message: str, function: Callable[..., Any]) -> str:
    """Return a message of a command line with the options of a function as a call writes them; a command in it stays."""
    known = parameters(function).values()
    flags = {parameter.key.replace("_", "-"): parameter for parameter in known}
    flags |= {parameter.option.short[1:]: parameter for parameter in known if parameter.option.short}

    def written(flag: re.Match[str]) -> str:
        parameter = flags.get(flag[2])
        if parameter is None:
            return flag[0]
        return f"{parameter.name}={not flag[1]}" if isinstance(parameter.default, bool) else parameter.name

    said, command, rest = message.partition("dovetail ")
    return FLAG.sub(written, said) + command + rest


def alternatives(hint: Any) -> tuple[Any, ...]:
    """Return the types of a union without None and those that are not imported, or the one type."""
    union = get_args(hint) if get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    return tuple(one for one in union if one not in (type(None), Any, Unresolved))


def values_of(hint: Any) -> tuple[Any, ...]:
    """Return the values of a Literal, alone or in a union; () where there is none."""
    return next((get_args(one) for one in alternatives(hint) if get_origin(one) is Literal), ())


class _Attributes(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return cls


class Unresolved(metaclass=_Attributes):
    """A type that is imported for type checkers only, as torch.dtype."""


class TypeNames(dict[str, Any]):
    """Names of an annotation that its module imports for type checkers only."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.module = vars(sys.modules[function.__module__])

    def __missing__(self, name: str) -> Any:
        if name in self.module or hasattr(builtins, name):
            raise KeyError(name)  # it is found there
        return Unresolved


def _hints(declaring: Callable[..., Any]) -> dict[str, Any]:
    return typing.get_type_hints(declaring, localns=TypeNames(declaring), include_extras=True)


def _split(hint: Any) -> tuple[Any, Option]:
    """Return the type and the option of an annotation; one of `X | None` may stand inside the union."""
    extras = getattr(hint, "__metadata__", ())
    option = next((extra for extra in extras if isinstance(extra, Option)), Option(""))
    return (hint.__origin__ if get_origin(hint) is Annotated else hint), option
