"""Parse the flags of a verb by tyro. A mistake is a UsageError of one line, with the nearest flag."""

from __future__ import annotations

import contextlib
import io
import re
import shutil
import sys
import textwrap
from types import ModuleType
from typing import Any

import tyro

from dovetail.cli.flags import Overrides, declared, flag_names, given_fields
from dovetail.core.errors import UsageError
from dovetail.core.suggest import did_you_mean

WIDEST = 120  # columns of the help
DESCRIPTION = "DESCRIPTION"  # its place in the help: tyro would join the lines of a wrapped paragraph
MISSING = "Missing from"
FRAME = re.compile(r"^[│|] ?(.*?) ?[│|]$")
RULE = re.compile(r"^[─\-]+$")


def parse(verb: ModuleType, name: str, args: list[str]) -> Any:
    """Return the verb's Command from its arguments. `--help` prints the help and raises SystemExit(0)."""
    command, prog = declared(verb.Command), f"dovetail {name}"
    _check_words(args, flag_names(command), name)
    output, errors = _Captured(), _Captured()
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            parsed = tyro.cli(command, args=args, prog=prog, description=DESCRIPTION)
    except SystemExit as ended:
        if not ended.code:
            usage, _, rest = output.getvalue().rstrip().partition("\n")
            print(textwrap.fill(usage, _columns(), subsequent_indent="    ", break_on_hyphens=False))
            print(rest.replace(DESCRIPTION, wrapped(verb.__doc__ or "")))
            raise
        raise UsageError(f"{name}: {problem(errors.getvalue())}; see {prog} --help") from None
    if isinstance(parsed, Overrides):
        parsed.given = given_fields(command, args)
    return parsed


class _Captured(io.StringIO):
    """What tyro prints: boxes of lines, which need UTF-8, with colors where stdout is a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return sys.__stdout__ is not None and sys.__stdout__.isatty()


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
        flag = word.partition("=")[0]
        if flag.startswith("--") and flag.replace("_", "-") not in flags:
            hint = did_you_mean(flag, flags) or f"flags: {', '.join(flags)}"
            raise UsageError(f"{prog}: unknown flag {flag}; {hint}")


def problem(box: str) -> str:
    """Return the first paragraph of a message of tyro, which it prints in a box, as one line."""
    lines = [match.group(1) for line in box.split("\n") if (match := FRAME.match(line.strip()))]
    if lines and lines[0].strip().startswith(MISSING):  # one argument per line, indented by four; its description by eight
        names = [line.strip() for line in lines if line.startswith("    ") and not line.startswith("     ")]
        return f"missing {', '.join(name for name in names if not name.startswith('dovetail '))}"
    first: list[str] = []
    for line in lines or box.split("\n\n")[0].splitlines():
        if RULE.match(line.strip()):
            break
        first.append(line)
    text = " ".join(" ".join(first).split()).rstrip(".:").removeprefix("Error parsing ")
    return text or "the arguments cannot be parsed"


def wrapped(text: str) -> str:
    """Return the text with its paragraphs wrapped at the width of the terminal; indented lines stay as they are."""
    blocks = text.strip("\n").split("\n\n")
    return "\n\n".join(
        block if block.startswith("  ") else textwrap.fill(" ".join(block.split()), _columns()) for block in blocks
    )


def _columns() -> int:
    return min(shutil.get_terminal_size().columns, WIDEST)
