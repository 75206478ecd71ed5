"""The command line: `dovetail VERB …`. A verb is a file of this folder with a dataclass of flags and a `run`; it is imported
only when called, and imports torch only when it runs: `--help`, `--version` and a YAML error answer at once."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

from dovetail import __version__
from dovetail.core.errors import DovetailError

VERBS = {
    "show": "what a model is and what it costs",
    "parts": "every part there is",
    "diff": "what becomes of each tensor between two specs",
    "graft": "change a trained model, keeping what can be kept",
    "laws": "hold every part to its laws",
    "verify": "where two implementations of a model part, and why",
    "train": "train a small model on a text",
    "generate": "let a model go on from a text",
    "map": "draw what the heads of a layer look at",
    "import": "turn a directory in Hugging Face layout into one of ours",
    "export": "write a model in Hugging Face layout",
    "port": "the families that can be read and written",
    "emit": "write a model as one plain PyTorch file",
}
HELP = """usage: dovetail VERB …

Change one part of a transformer. Everything else fits, and proves it.

{verbs}

  dovetail VERB --help tells more. SPEC is a preset's name, a .yaml file or a model directory.
  Exit codes: 1 a law fails, 2 usage, 3 spec, 4 data or file, 5 diverged."""


def main(argv: list[str] | None = None) -> None:
    """Run one verb; every error a user can cause is one line on stderr and its own exit code."""
    try:
        code = _answer(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
    except DovetailError as error:
        from dovetail.cli.output import print_error

        print_error(error)
        code = error.exit_code
    except BrokenPipeError:  # `| head` has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)


def _answer(args: list[str]) -> int:
    """The help, the version, or what a verb does; the exit code."""
    if not args or args[0] in ("-h", "--help"):
        width = max(len(verb) for verb in VERBS)
        print(HELP.format(verbs="\n".join(f"  {name:{width}}   {text}" for name, text in VERBS.items())))
        return 0 if args else 2
    if args[0] in ("-V", "--version"):
        print(f"dovetail {__version__}")
        return 0
    if args[0] not in VERBS:
        print(f"dovetail: no verb is called {args[0]!r}; verbs: {', '.join(VERBS)}", file=sys.stderr)
        return 2
    import tyro

    verb = importlib.import_module(f"dovetail.cli.{args[0]}")
    command = tyro.cli(verb.Command, args=args[1:], prog=f"dovetail {args[0]}", description=verb.__doc__)
    _read_specs_first(args[1:])
    return command.run() or 0


def _read_specs_first(args: list[str]) -> None:
    """A YAML file with a syntax error is answered before torch is imported."""
    from dovetail.io.yaml import parse_yaml, read_text

    for arg in args:
        if arg.endswith((".yaml", ".yml")) and Path(arg).is_file():
            parse_yaml(read_text(Path(arg)), arg)
