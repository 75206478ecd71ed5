"""The child process that renders one chat template, once or many times: JSON on stdin, JSON on stdout.

A template is untrusted code. Jinja's immutable sandbox blocks internal attributes and changes to the variables, but not endless
loops or endless output. So the template runs in a process of its own, which limits its CPU time, memory and output before it
reads a byte; the parent kills it after a timeout.

This file is run by its path with an empty environment. It imports jinja2 and the standard library, and no module of ours.
"""

from __future__ import annotations

import datetime
import json
import math
import resource
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Generation(Extension):
    """`{% generation %} … {% endgeneration %}` marks the turns of the assistant; it renders as its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the statements of the body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def render(template: str, given: Sequence[dict[str, Any]], longest: int) -> list[str]:
    """Return the template rendered with each of the variables; more than `longest` characters are an error."""
    sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
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


def main() -> None:
    """Set the limits, read the request, render, write the result."""
    seconds, memory = (int(text) for text in sys.argv[1:3])
    signal.setitimer(signal.ITIMER_PROF, seconds)  # ends the process after so much more CPU time, to a fraction of a second
    whole = seconds + math.ceil(time.process_time())  # of the process: the imports above count, too
    resource.setrlimit(resource.RLIMIT_CPU, (whole, whole + 1))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (8, 8))
    request = json.load(sys.stdin)
    try:
        result = {"texts": render(request["template"], request["given"], request["longest"])}
    except MemoryError:
        result = {"error": f"it takes more than {memory >> 20} MB of memory"}
    except RecursionError:
        result = {"error": "it calls itself without end"}
    except Exception as error:  # a template may raise anything
        result = {"error": f"{type(error).__name__}: {str(error)[:400]}"}
    sys.stdout.write(json.dumps(result))


if __name__ == "__main__":
    main()
