"""Children that render chat templates (render.py): each stays, and forks once per request.

    answer = ask(request, seconds)          a child that is idle, or a new one; as many as there are callers at once

Starting Python and importing Jinja takes a tenth of a second, a fork a millisecond. A request is a line, `SECONDS JSON`, and so
is an answer. A child ends when its stdin closes, with this process.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from dovetail.core.limits import TEMPLATE_MEMORY

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
