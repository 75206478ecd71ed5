"""Talk with a model in the terminal: answers are streamed, and the conversation is remembered.

Ctrl-C ends an answer, Ctrl-D the conversation. Lines that begin with a slash are commands: /undo forgets the last turn, /forget
all of them, /save FILE writes the conversation as JSON Lines for `dovetail tune`, /help lists these. If stdin is no terminal,
each of its lines is a message, and there are no commands.

    dovetail chat Qwen3-0.6B --system "Answer in one sentence."
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from dovetail.base.errors import DovetailError, InputError
from dovetail.base.limits import PROMPT_CHARACTERS
from dovetail.base.option import Option
from dovetail.base.termination import surviving_interrupts
from dovetail.cli.command import Options, call
from dovetail.cli.output import print_json, print_note, print_text, to_json

if TYPE_CHECKING:
    from dovetail.serving.chat import Chat

PROMPT = "› "
HELP = "/undo the last turn, /forget all, /save FILE, /bye or Ctrl-D to end"


def run(given: Options, json: Annotated[bool, Option("Print one JSON object per answer.")] = False) -> None:
    """Load, then answer line by line."""
    from dovetail.api.chat import chat

    talk = call(chat, given)
    terminal = sys.stdin.isatty() and not json
    if terminal:
        print_note(HELP)
    with surviving_interrupts() if terminal else contextlib.nullcontext():
        _talk(talk, terminal, json)


def _talk(talk: Chat, terminal: bool, json: bool) -> None:
    for line in _lines(terminal):
        try:
            if line.startswith("/") and terminal:  # text from elsewhere must not name files to write
                if not _command(talk, line):
                    break
            else:
                _answer(talk, line, terminal, json)
        except DovetailError as error:  # of this message: the conversation continues where somebody can fix it
            if not terminal:
                raise
            print_note(str(error))


def _answer(talk: Chat, line: str, terminal: bool, json: bool) -> None:
    try:
        answer = talk.ask(line, None if json else print_text)
    except KeyboardInterrupt:
        if not terminal:
            raise
        print()
        return
    if json:
        print_json(answer.to_dict())
    else:
        print()
        left_out = f"; {talk.left_out} of the oldest turns left out" if talk.left_out else ""
        print_note(f"{len(answer.tokens)} tokens, {answer.tokens_per_second:.1f} tokens/s ({answer.finish}){left_out}")
    sys.stdout.flush()


def _lines(terminal: bool) -> Iterator[str]:
    """The lines that are not empty: of a terminal with editing and history, or of stdin."""
    if terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  gives input() editing and history
    while True:
        try:
            line = input(PROMPT) if terminal else sys.stdin.readline(PROMPT_CHARACTERS + 1)
        except EOFError:
            print()
            return
        except KeyboardInterrupt:  # at the prompt: an empty line
            if not terminal:
                raise
            print()
            continue
        except UnicodeDecodeError as error:
            raise InputError(f"stdin: is not UTF-8 ({error.reason} at byte {error.start})") from error
        if not terminal and not line:
            return
        if len(line) > PROMPT_CHARACTERS:
            raise InputError(f"stdin: a line has more than {PROMPT_CHARACTERS:,} characters")
        if line.strip():
            yield line.strip()


def _command(talk: Chat, line: str) -> bool:
    """Run a line that begins with a slash; False where it ends the conversation."""
    name, _, rest = line[1:].partition(" ")
    if name in ("bye", "exit", "quit"):
        return False
    if name == "forget":
        talk.forget()
        print_note("all turns are forgotten")
    elif name == "undo":
        print_note("the last turn is forgotten" if talk.undo() else "there is no turn")
    elif name == "save" and rest.strip():
        from dovetail.disk.atomic import check_free, write_atomically

        path = Path(rest.strip())
        check_free(path, False, "choose another path")
        write_atomically(path, to_json({"messages": talk.messages}) + "\n")
        print_note(f"{path}: written")
    else:
        print_note(HELP)
    return True
