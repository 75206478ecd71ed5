"""Chat templates: messages to a prompt, by the Jinja template of a model directory.

The template is `chat_template.jinja`, or `chat_template` in tokenizer_config.json. It is rendered in a child process with
limits on time, memory and output (render.py).

Children that render chat templates (render.py): each stays, and forks once per request.

    answer = ask(request, seconds)          a child that is idle, or a new one; as many as there are callers at once

Starting Python and importing Jinja takes a tenth of a second, a fork a millisecond. A request is a line, `SECONDS JSON`, and so
is an answer. A child ends when its stdin closes, with this process.
"""

from __future__ import annotations

import atexit
import dataclasses as dc
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dovetail.base.errors import FileError
from dovetail.base.limits import JSON_BYTES, TEMPLATE_BYTES, TEMPLATE_CHARACTERS, TEMPLATE_MEMORY, TEMPLATE_SECONDS
from dovetail.disk.model_files import TEMPLATE_FILE
from dovetail.disk.untrusted import Directory

CONFIG_FILE = "tokenizer_config.json"
AT_ONCE = 256  # conversations that one child renders
RENDERS_PER_SECOND = 64  # conversations that share the time limit of one

Message = Mapping[str, Any]  # role and content


@dc.dataclass(frozen=True)
class ChatTemplate:
    """A template, the file it comes from, and the special tokens it may use (`bos_token` …)."""

    text: str
    origin: str
    tokens: Mapping[str, str] = dc.field(default_factory=dict)

    @staticmethod
    def load(directory: str | Path) -> ChatTemplate:
        """Return the template of a model directory."""
        where = Directory(directory)
        config = where.json(CONFIG_FILE, JSON_BYTES) if where.has(CONFIG_FILE) else {}
        tokens = {name: text for name, value in config.items() if name.endswith("_token") and (text := special_token(value))}
        if where.has(TEMPLATE_FILE):
            return ChatTemplate(where.text(TEMPLATE_FILE, TEMPLATE_BYTES), str(where.place / TEMPLATE_FILE), tokens)
        text = _template(config.get("chat_template"))
        if text is None or len(text) > TEMPLATE_BYTES:
            raise FileError(f"{where.place}: has no chat template ({TEMPLATE_FILE}, or in {CONFIG_FILE})")
        return ChatTemplate(text, str(where.place / CONFIG_FILE), tokens)

    def render(self, messages: Sequence[Message], *, prompt: bool = True, **given: Any) -> str:
        """Return the prompt of a conversation. `prompt` is the template's `add_generation_prompt`; `given` are more variables
        of the template (`tools`, `documents`, settings of its own)."""
        return self.render_many([(messages, prompt)], **given)[0]

    def render_many(self, requests: Sequence[tuple[Sequence[Message], bool]], **given: Any) -> list[str]:
        """Return the text of each conversation, with the generation prompt where its flag is true; AT_ONCE of them are rendered
        by one process, which compiles the template once."""
        variables = {"tools": None, "documents": None, **self.tokens, **given}
        texts = list[str]()
        for some in (requests[i : i + AT_ONCE] for i in range(0, len(requests), AT_ONCE)):
            all_given = [{**variables, "messages": list(messages), "add_generation_prompt": flag} for messages, flag in some]
            seconds = TEMPLATE_SECONDS * -(-len(some) // RENDERS_PER_SECOND)
            result = ask({"template": self.text, "given": all_given, "longest": TEMPLATE_CHARACTERS}, seconds)
            if "texts" not in result:
                raise FileError(f"{self.origin}: the chat template cannot be rendered ({result['error']})")
            texts += result["texts"]
        return texts


def special_token(value: Any) -> str | None:
    """Return a special token, written as a string or as an object with `content`."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def _template(value: Any) -> str | None:
    """Return the template, of several the one named default."""
    if isinstance(value, list):
        value = next((one.get("template") for one in value if isinstance(one, dict) and one.get("name") == "default"), None)
    return value if isinstance(value, str) else None


ENDED = 20  # seconds after which a fork must have ended, however busy the machine is
Child = subprocess.Popen[bytes]
_idle: list[Child] = []
_inherited: list[Child] = []  # of the process that forked this one, which talks to them


def ask(request: dict[str, Any], seconds: int) -> dict[str, Any]:
    """Return what render.py answers within so many seconds of CPU time: `texts`, or `error`."""
    line = b"%d %s\n" % (seconds, json.dumps(request).encode())
    child = _taken()
    assert child.stdin is not None
    assert child.stdout is not None
    answer = b""
    try:
        with suppress(OSError):  # it was killed
            child.stdin.write(line)
            child.stdin.flush()
            answer = child.stdout.readline()
    finally:  # after Ctrl-C, too: an answer that nobody has read would be that of the next request
        if answer:
            _idle.append(child)
        else:
            _end(child)
    try:
        return json.loads(answer)
    except ValueError:  # the system killed it
        return {"error": f"it took more than {seconds} s or {TEMPLATE_MEMORY >> 20} MB"}


def _taken() -> Child:
    """A child that lives, and that nobody else asks."""
    with suppress(IndexError):  # another thread may take the last one
        while True:
            child = _idle.pop()
            if child.poll() is None:
                return child
            _end(child)
    command = [sys.executable, "-I", str(Path(__file__).with_name("render.py")), str(TEMPLATE_MEMORY), str(ENDED)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env={})


def _end(child: Child) -> None:
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()


@atexit.register
def _end_all() -> None:
    while _idle:
        _end(_idle.pop())


def _forked() -> None:
    _inherited.extend(_idle)
    _idle.clear()


os.register_at_fork(after_in_child=_forked)
