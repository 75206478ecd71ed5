"""The child that renders one chat template: JSON on stdin, JSON on stdout, and nothing else at hand.

A template is a stranger's program. The immutable sandbox keeps it from attributes it has no business with and from changing
what it was given; it does not keep it from loops without end or from texts without end. So it runs in a process of its own,
which limits its time, memory and output before it reads a byte, and which the parent kills when it has waited too long.

This file is run by its path, with none of our modules and no environment: it imports jinja2 and the standard library alone.
"""

from __future__ import annotations

import datetime
import json
import resource
import sys
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Generation(Extension):
    """`{% generation %} … {% endgeneration %}` marks what the model wrote: for us its body alone."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements in between."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def render(template: str, given: dict[str, Any], longest: int) -> str:
    """The text of a template; more than `longest` characters are an error."""
    sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    sandbox.filters["tojson"] = _to_json
    sandbox.globals["raise_exception"] = _refuse
    sandbox.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    pieces, length = [], 0
    for piece in sandbox.from_string(template).generate(**given):
        length += len(piece)
        if length > longest:
            raise TemplateError(f"it writes more than {longest:,} characters")
        pieces.append(piece)
    return "".join(pieces)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Plain JSON: jinja's own writes < and & as HTML wants them."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(f"the template refuses: {message}")


def main() -> None:
    """Limit, read, render, answer."""
    seconds, memory = (int(text) for text in sys.argv[1:3])
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (8, 8))
    asked = json.load(sys.stdin)
    try:
        answer = {"text": render(asked["template"], asked["given"], asked["longest"])}
    except MemoryError:
        answer = {"error": f"it takes more than {memory >> 20} MB of memory"}
    except RecursionError:
        answer = {"error": "it calls itself without end"}
    except Exception as error:  # a template may raise anything at all
        answer = {"error": f"{type(error).__name__}: {str(error)[:400]}"}
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main()
