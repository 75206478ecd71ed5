"""The command line: `dovetail VERB …`.

A verb is a function of the api room: its signature declares the flags, the docstring of its module is the help (command.py). It
is imported when it is called, and imports torch when it runs: `--help`, `--version` and an error in a YAML file need no torch.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from typing import NoReturn

from dovetail import __version__
from dovetail.base.errors import UsageError, did_you_mean, names_or_nearest
from dovetail.base.termination import Terminated, end_children, watched
from dovetail.cli.command import command_of
from dovetail.cli.failure import close_stdout, guarded, report
from dovetail.cli.verbs import VERBS as VERBS

HELP = """usage: dovetail VERB …

Change one part of a transformer. Everything else fits, and proves it.

{verbs}

  dovetail VERB --help lists the flags of a verb. SPEC is a preset's name, a .yaml file or a model directory.
  Exit codes: 1 a law fails, 2 usage, 3 spec, 4 data or file, 5 diverged, 70 a defect of Dovetail, 130 interrupted."""


def main(argv: list[str] | None = None) -> NoReturn:
    """Run one verb and exit. Whatever ends it early is one line on stderr and an exit code (failure.py)."""
    with watched(), guarded():
        try:
            code = _run(sys.argv[1:] if argv is None else argv)
            if sys.stdout is not None:
                sys.stdout.flush()
        except BrokenPipeError:  # the reader closed the pipe, as `| head` does
            close_stdout()
            code = 0
        except SystemExit as ended:  # --help
            code = ended.code
        except BaseException as error:
            code = report(error)
            if isinstance(error, OSError):  # stdout may be the full disk, and Python flushes it once more at its end
                close_stdout()
            if argv is None and isinstance(error, KeyboardInterrupt | Terminated):  # this process is the verb's
                _exit(code)
    sys.exit(code)


def _exit(code: int) -> NoReturn:
    """Exit after a signal, still watched: without the children, and without joining threads that may wait for them."""
    end_children()
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError, AttributeError):  # nothing reads stdout, or there is none
        sys.stdout.flush()
    os._exit(code)


def _run(args: list[str]) -> int:
    """Print the help or the version, or run a verb; return the exit code."""
    if not args or args[0] in ("-h", "--help"):
        width = max(len(verb) for verb in VERBS)
        print(HELP.format(verbs="\n".join(f"  {name:{width}}   {verb.summary}" for name, verb in VERBS.items())))
        return 0 if args else 2
    if args[0] in ("-V", "--version"):
        print(f"dovetail {__version__}")
        return 0
    group = [verb for verb in VERBS if verb.startswith(f"{args[0]} ")]
    if group and args[0] not in VERBS and args[1:] in (["-h"], ["--help"]):
        print("\n".join(f"dovetail {verb}   {VERBS[verb].summary}" for verb in group))
        return 0
    name, rest = _verb(args)
    from dovetail.cli.parser import parse

    command = command_of(name)
    given = parse(name, command.about, command.options, rest)
    try:
        return command.run(given)
    except SystemExit as ended:  # code that the verb ran: a py: side, a module of --load
        raise UsageError(
            f"dovetail {name}: the code that was run called sys.exit({ended.code!r}); there is no result"
        ) from ended


def _verb(args: list[str]) -> tuple[str, list[str]]:
    """Return the verb, of one word or two, and its arguments."""
    for words in (2, 1):
        if (name := " ".join(args[:words])) in VERBS:
            return name, args[words:]
    second = [verb.split()[1] for verb in VERBS if verb.startswith(f"{args[0]} ")]
    if second:
        given = f"unknown verb {' '.join(args[:2])!r}" if len(args) > 1 else f"{args[0]}: a second word is missing"
        raise UsageError(f"{given}; {names_or_nearest(args[1] if len(args) > 1 else '', second, 'verbs')}")
    near = did_you_mean(args[0], {verb.split()[0] for verb in VERBS}) or f"verbs: {', '.join(VERBS)}"
    raise UsageError(f"unknown verb {args[0]!r}; {near}")
