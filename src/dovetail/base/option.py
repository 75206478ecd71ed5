"""Option: what a parameter of a public function says about itself, once, in its annotation.

    def show(spec: …, *, length: Annotated[int | None, Option("Tokens per sequence.", low=1, high=MAX_LENGTH)] = None): …

The flag, its line of help, the key of a run file, completion and the check of the value follow from it. A call from Python is
checked by `checks_options`, and its errors are written by `names_options`: messages name an option as the command line does,
`--length`, and a call as `length`.
"""

from __future__ import annotations

import dataclasses as dc
import functools
import inspect
import math
import re
import typing
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple, ParamSpec, TypeVar, get_origin

from dovetail.base.errors import DovetailError, UsageError
from dovetail.base.keywords import checks_keywords
from dovetail.base.limits import MAX_BATCH, MAX_NEW_TOKENS
from dovetail.base.option_group import OptionGroup, grouped, ungrouped
from dovetail.base.units import read_count
from dovetail.base.value import TypeNames, type_problem

P = ParamSpec("P")
R = TypeVar("R")
FLAG = re.compile(r"(?<![\w-])--?(no-)?([a-z][a-z-]*)")  # in a message
WORD = r"[^\s`;,)-][^\s`;,)]*"
COMMAND = re.compile(rf"dovetail (\w+)((?: {WORD})?)((?: --?[a-z-]+(?: {WORD})?)+)")  # with options


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
        if self.read is read_count and isinstance(value, str):
            try:
                value = read_count(value)
            except ValueError as error:
                return str(error)
        unbounded = math.isinf(self.low) and math.isinf(self.high)
        if unbounded or isinstance(value, bool) or not isinstance(value, int | float):
            return None
        if self.low <= value <= self.high and not (self.above and value == self.low):
            return None
        low, high = (f"{bound:,}" if isinstance(bound, int) else f"{bound:g}" for bound in (self.low, self.high))
        shown = f"{value:,}" if isinstance(value, int) else f"{value:g}"
        if math.isinf(self.high):
            return f"{shown} is not above {low}" if self.above else f"{shown} is below {low}"
        return f"{shown} is not above {low}, up to {high}" if self.above else f"{shown} is not from {low} to {high}"


# of options of api and of training
BatchSize = functools.partial(Option, low=1, high=MAX_BATCH)
SampleTokens = functools.partial(Option, low=0, high=MAX_NEW_TOKENS)


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

    def problem(self, value: Any) -> str | None:
        """Return what is wrong with a value: its type, or its bounds; None if nothing is."""
        return type_problem(value, self.hint) or self.option.problem(value)


def parameters(function: Callable[..., Any]) -> dict[str, Parameter]:
    """Return the parameters of a function by name, those without an option too, and the fields of each group in its place."""
    hints = _hints(function)
    result: dict[str, Parameter] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if isinstance(group := parameter.default, OptionGroup):
            known = _hints(type(group))
            result |= {field: Parameter(field, *_split(known[field]), value) for field, value in vars(group).items()}
        else:
            hint, option = _split(hints.get(name, Any))
            result[name] = Parameter(name, hint, option, parameter.default, parameter.kind is parameter.VAR_POSITIONAL)
    return result


def declared(function: Callable[..., Any]) -> dict[str, Parameter]:
    """Return the parameters that are options, by name."""
    return {name: parameter for name, parameter in parameters(function).items() if parameter.option.help}


def checks_options(function: Callable[P, R]) -> Callable[P, R]:
    """Raise UsageError for a value of another type than that of its parameter, or outside its bounds."""
    known = functools.cache(lambda: parameters(function))
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: P.args, **keywords: P.kwargs) -> R:
        try:
            given = signature.bind(*args, **grouped(function, keywords)).arguments
        except TypeError:  # an argument is missing, or one too many: the call says which
            return function(*args, **keywords)
        for name, value in ungrouped(given).items():
            for item in value if known()[name].variadic else (value,):
                if (problem := known()[name].problem(item)) is not None:
                    raise UsageError(f"{name}: {problem}")
        return function(*args, **keywords)

    return call


def public_function(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function as `dovetail` provides it: with its keywords and values checked, and errors in its own words."""
    return names_options(checks_keywords(checks_options(function)))


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
    """Return a message of a command line with the options of a function, and the commands in it, as a call writes them."""
    known = parameters(function).values()
    flags = {parameter.key.replace("_", "-"): parameter for parameter in known}
    flags |= {parameter.option.short[1:]: parameter for parameter in known if parameter.option.short}

    def written(flag: re.Match[str]) -> str:
        parameter = flags.get(flag[2])
        if parameter is None:
            return flag[0]
        return f"{parameter.name}={not flag[1]}" if isinstance(parameter.default, bool) else parameter.name

    return FLAG.sub(written, COMMAND.sub(_as_call, message))


def _as_call(command: re.Match[str]) -> str:
    """Return `dt.merge('model', out=DIR)` for `dovetail merge model -o DIR`."""
    options = re.findall(rf"--?([a-z-]+)(?: ({WORD}))?", command[3].replace(" -o", " --out"))
    given = [f"{name.replace('-', '_')}={value or True}" for name, value in options]
    return f"dt.{command[1]}({', '.join([*map(repr, command[2].split()), *given])})"


def _hints(declaring: Callable[..., Any]) -> dict[str, Any]:
    return typing.get_type_hints(declaring, localns=TypeNames(declaring), include_extras=True)


def _split(hint: Any) -> tuple[Any, Option]:
    """Return the type and the option of an annotation; one of `X | None` may stand inside the union."""
    extras = getattr(hint, "__metadata__", ())
    option = next((extra for extra in extras if isinstance(extra, Option)), Option(""))
    return (hint.__origin__ if get_origin(hint) is Annotated else hint), option
