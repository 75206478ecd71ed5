"""The process that renders chat templates: a line on stdin per request, a line of JSON on stdout per answer (chat.py).

    python -I render.py MEMORY TIMEOUT          SECONDS {"template": …, "given": […], "longest": …}  ->  {"texts": […]}

A template is untrusted code. Jinja's immutable sandbox blocks internal attributes and changes to the variables, but not endless
loops or endless output. So each request is rendered by a fork of this process, which limits its CPU time, memory and output
before it parses a byte, and keeps nothing for the next; it is killed after a timeout.

This file is run by its path with an empty environment. It imports jinja2 and the standard library, and no module of ours.
"""

from __future__ import annotations

import datetime
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class GenerationTag(Extension):
    """`{% generation %} … {% endgeneration %}` marks the turns of the assistant; it renders as its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the statements of the body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def render(template: str, given: Sequence[dict[str, Any]], longest: int) -> list[str]:
    """Return the template rendered with each of the variables; more than `longest` characters are an error."""
    sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols])
    sandbox.filters["tojson"] = _to_json
    sandbox.globals["raise_exception"] = _refuse
    sandbox.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    parsed, texts = sandbox.from_string(template), list[str]()
    for variables in given:
        pieces, length = [], 0
        for piece in parsed.generate(**variables):
            length += len(piece)
            if length > longest:
                raise TemplateError(f"it writes more than {longest:,} characters")
            pieces.append(piece)
        texts.append("".join(pieces))
    return texts


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return plain JSON: Jinja's own filter escapes < and & for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(f"the template refuses: {message}")


def rendered(data: bytes, seconds: int, memory: int) -> bytes:
    """Set the limits of this process; return the answer to a request."""
    signal.setitimer(signal.ITIMER_PROF, seconds)  # ends the process, to a fraction of a second; the next lines bound it too
    resource.setrlimit(resource.RLIMIT_CPU, (seconds + 1, seconds + 2))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (8, 8))
    try:
        request = json.loads(data)
        result = {"texts": render(request["template"], request["given"], request["longest"])}
    except MemoryError:
        result = {"error": f"it takes more than {memory >> 20} MB of memory"}
    except RecursionError:
        result = {"error": "it calls itself without end"}
    except Exception as error:  # a template may raise anything
        result = {"error": f"{type(error).__name__}: {str(error)[:400]}"}
    return json.dumps(result).encode()


def forked(data: bytes, seconds: int, memory: int, timeout: float) -> bytes:
    """Return the answer of a fork; a part of it, or nothing, where the system ended the fork or the time is over."""
    source, sink = os.pipe()
    child = os.fork()
    if not child:
        try:
            for other in (source, sys.stdin.fileno(), sys.stdout.fileno()):
                os.close(other)
            with open(sink, "wb") as answer:
                answer.write(rendered(data, seconds, memory))
        finally:
            os._exit(0)
    os.close(sink)
    answer, end = bytearray(), time.monotonic() + timeout
    while select.select([source], [], [], max(0.0, end - time.monotonic()))[0]:
        piece = os.read(source, 1 << 20)
        answer += piece
        if not piece or len(answer) > memory:
            break
    os.close(source)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return bytes(answer)


def main() -> None:
    """Answer until stdin closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group: the parent decides when this one ends
    memory, timeout = (int(text) for text in sys.argv[1:3])
    for line in sys.stdin.buffer:
        seconds, _, data = line.partition(b" ")
        answer = forked(data, int(seconds), memory, timeout).replace(b"\n", b" ")
        sys.stdout.buffer.write(answer + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
