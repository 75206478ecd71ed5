"""Parse the arguments of a verb by argparse. The parser follows from the options of its functions (base/option.py).

argparse is asked only to split the line: readers and bounds are those of the options, so that a mistake is one line with the
flag, the problem and the nearest flag.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import shlex
import shutil
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin

from dovetail.base.errors import UsageError, names_or_nearest
from dovetail.base.option import Parameter
from dovetail.base.value import alternatives, type_problem, values_of

WIDEST = 120  # columns of the help
DIGITS = 40  # of a whole number
FORMS: dict[Any, str] = {Path: "PATH", int: "N", float: "X", str: "TEXT"}
COLUMN = 26  # at which the texts of the help begin
Read = Callable[[str], Any]


def parse(name: str, about: str, options: Mapping[str, Parameter], args: list[str]) -> dict[str, Any]:
    """Return the values on a command line by the names of their options. `--help` prints the help and raises SystemExit(0)."""
    _check_words(args, flag_names(options), name)
    parser = _Parser(
        prog=f"dovetail {name}",
        usage=_usage(name, options.values()),
        description=wrapped(about),
        formatter_class=_Formatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        exit_on_error=False,
    )
    for option in options.values():
        _add(parser, option)
    try:
        values, rest = parser.parse_known_intermixed_args([_dashed(word) for word in args])
        if rest:
            raise argparse.ArgumentError(None, _superfluous(rest[0], options))
        if missing := [_named(option) for option in options.values() if option.required and option.name not in values]:
            raise argparse.ArgumentError(None, f"missing {', '.join(missing)}")
    except argparse.ArgumentError as error:
        flag, problem = (error.argument_name or "").rpartition("/")[2], error.message
        if problem.startswith("expected "):
            (option,) = (option for option in options.values() if flag in _flags(option))
            many, _, form = _reader(option)
            problem = f"a value is missing: {' '.join([flag, *[form] * (many if isinstance(many, int) else 1)])}"
            flag = ""
        raise UsageError(f"{name}: {flag and flag + ': '}{problem}; see dovetail {name} --help") from None
    return vars(values)


def flag_names(options: Mapping[str, Parameter]) -> list[str]:
    """Return the flags that a verb takes, as they are written."""
    return ["--help", *(flag for option in options.values() for flag in reversed(_flags(option)))]


def wrapped(text: str) -> str:
    """Return the text with its paragraphs wrapped at the width of the terminal; indented lines and commands stay as they are.

    A paragraph begins with a capital, a block of commands does not: both may stand at the margin, where the formatter
    and Python put the lines of a docstring."""
    return "\n\n".join(
        block
        if block.startswith("  ")
        else textwrap.indent(block, "    ")
        if block[:1].islower()
        else textwrap.fill(" ".join(block.split()), _columns())
        for block in text.strip("\n").split("\n\n")
    )


def _superfluous(word: str, options: Mapping[str, Parameter]) -> str:
    """Return the problem of a word that no option takes."""
    if word.startswith("-"):
        return f"unknown flag {word}; {names_or_nearest(word, flag_names(options), 'flags')}"
    taken = " ".join(_named(option) for option in options.values() if not _flags(option))
    return f"{word!r} is one argument too many; besides flags it takes {taken or 'none'}"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise argparse.ArgumentError(None, message)


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=COLUMN, width=_columns())

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)


def _add(parser: argparse.ArgumentParser, option: Parameter) -> None:
    """Add the argument of an option."""
    declared = option.option
    flags = _flags(option) or [option.name]
    text = declared.help.replace("%", "%%") + _shown_default(option)
    if isinstance(option.default, bool):
        action = argparse.BooleanOptionalAction if option.default else "store_true"
        parser.add_argument(*flags[:1], dest=option.name, action=action, help=text)
        return
    many, read, form = _reader(option)
    settings: dict[str, Any] = {"help": text, "metavar": form, "type": _reported(read, option)}
    if flags[0].startswith("-"):
        settings["dest"] = option.name
    if many and declared.repeat:
        settings["action"] = "append"
    elif many or not flags[0].startswith("-"):  # argparse reports no missing argument: it has no placeholder in its message
        settings["nargs"] = many or "?"
    if isinstance(many, int):
        settings["metavar"] = (form,) * many
    parser.add_argument(*flags, **settings)


def _reader(option: Parameter) -> tuple[str | int | None, Read, str]:
    """Return how many values an option has (None: one), the reader of a value, and its placeholder."""
    kinds = alternatives(option.hint)
    several = next((kind for kind in kinds if get_origin(kind) in (tuple, Sequence) or get_origin(kind) is Iterable), None)
    many: str | int | None = None
    item: Any = option.hint
    if option.variadic:
        many = "*"
    elif option.option.repeat:
        many, item = "*", str if several is None or str in kinds else get_args(several)[0]
    elif several is not None and (str not in kinds or option.default == () or option.required):
        inner = get_args(several)
        many, item = (len(inner), inner[0]) if get_origin(several) is tuple and Ellipsis not in inner else ("*", inner[0])
    read, form = _read_as(item)
    return many, option.option.read or read, option.option.form or form


def _read_as(hint: Any) -> tuple[Read, str]:
    """Return the reader and the placeholder of a type."""
    if values := values_of(hint):
        return _typed(str, hint), "|".join(values)
    kinds = alternatives(hint)
    kind = next((kind for kind in FORMS if kind in kinds), str)
    return _typed(kind, kind), FORMS[kind]


def _typed(kind: Callable[[str], Any], hint: Any) -> Read:
    """Return a reader of texts, whose errors are those of the type."""

    def read(text: str) -> Any:
        value: Any = text
        if kind is not int or (text.strip().lstrip("+-").isdigit() and len(text) <= DIGITS):
            with contextlib.suppress(ValueError):
                value = kind(text)
        if (problem := type_problem(value, hint)) is not None:
            raise ValueError(problem)
        return value

    return read


def _reported(read: Read, option: Parameter) -> Read:
    """Return the reader, with an error that argparse repeats as it is, for values that cannot be read or are out of bounds."""

    def reported(text: str) -> Any:
        if text is argparse.SUPPRESS:  # argparse reads its default for a positional argument that is not given
            return text
        try:
            value = read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        if (problem := option.option.problem(value)) is not None:
            raise argparse.ArgumentTypeError(problem)
        return value

    return reported


def _flags(option: Parameter) -> list[str]:
    """The flags of an option, as they are written; a positional argument has none."""
    if option.option.argument or option.variadic:
        return []
    flag = option.key.replace("_", "-")
    short = [] if option.option.short is None else [option.option.short]
    return [*short, f"--{flag}", *([f"--no-{flag}"] if option.default is True else [])]


def _named(option: Parameter) -> str:
    """An option with its placeholder: -o DIR, --out DIR."""
    form = _reader(option)[2]
    return ", ".join(f"{flag} {form}" for flag in _flags(option)) or form


def _usage(name: str, options: Iterable[Parameter]) -> str:
    words = [f"dovetail {name} [-h] [OPTIONS]"]
    for option in options:
        if not _flags(option):
            many, _, form = _reader(option)
            shown = f"{form} ..." if many else form
            words.append(shown if option.required else f"[{shown}]")
        elif option.required:
            words.append(f"--{option.key.replace('_', '-')} {_reader(option)[2]}")
    text = textwrap.fill(" ".join(["usage:", *words]), _columns(), subsequent_indent="    ", break_on_hyphens=False)
    return text.removeprefix("usage: ").replace("%", "%%")


def _shown_default(option: Parameter) -> str:
    """What the help says after the line of an option: its default, if there is one worth saying."""
    if option.required:
        return " (required)"
    default = option.default
    if isinstance(default, bool) or not isinstance(default, int | float | str | Path) or default == math.inf:
        return ""
    return f" (default: {shlex.quote(default) if isinstance(default, str) else default})".replace("%", "%%")


def _check_words(args: list[str], flags: list[str], prog: str) -> None:
    """Raise for a flag that does not exist, and for an argument that is not text (tests can pass one, a shell cannot)."""
    for word in args:
        try:
            word.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            raise UsageError(f"{prog}: {word!r} is not text") from None
        if "\0" in word:
            raise UsageError(f"{prog}: {word!r} holds a NUL character")
    for word in args:
        if word == "--":
            return
        flag, _, value = word.partition("=")
        if flag.startswith("-") and value == "--":  # argparse would drop it
            raise UsageError(f"{prog}: {flag}: '--' cannot be its value")
        if flag.startswith("--") and flag.replace("_", "-") not in flags:
            raise UsageError(f"{prog}: unknown flag {flag}; {names_or_nearest(flag, flags, 'flags')}")


def _dashed(word: str) -> str:
    """--learning_rate=1 is --learning-rate=1."""
    flag, equals, value = word.partition("=")
    return f"{flag.replace('_', '-')}{equals}{value}" if flag.startswith("--") else word


def _columns() -> int:
    return min(shutil.get_terminal_size().columns, WIDEST)
