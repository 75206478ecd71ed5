"""vLLM's own server as a child process, which gets our signals and ends with us."""

from __future__ import annotations

import contextlib
import http.client
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Sequence

from dovetail.base.errors import DovetailError

SECONDS = 1800.0  # until the server answers: it may read large weights, and compile
BETWEEN = 0.5  # seconds between two questions whether it does


@contextlib.contextmanager
def running(command: Sequence[str], environment: dict[str, str]) -> Generator[subprocess.Popen[bytes]]:
    """A process that gets our signals, and ends with us. DovetailError: it failed, and no signal had ended it."""
    child, asked = subprocess.Popen(command, env=environment, stdout=sys.stderr), list[int]()

    def forward(number: int, _: object) -> None:
        asked.append(number)
        child.send_signal(number)

    before = {one: signal.signal(one, forward) for one in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield child
    finally:
        if child.poll() is None:
            child.terminate()
            child.wait()
        for one, handler in before.items():
            signal.signal(one, handler)
    if child.returncode and not asked:
        raise DovetailError(f"vLLM ended with exit code {child.returncode}; its own messages are above")


def wait_until_ready(child: subprocess.Popen[bytes], host: str, port: int) -> bool:
    """Wait until /health answers by 200; False where the process ends before. DovetailError: it never does."""
    end = time.monotonic() + SECONDS
    asked = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    while time.monotonic() < end:
        if child.poll() is not None:
            return False
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection(asked, port, timeout=5)
            try:
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return True
            finally:
                connection.close()
        time.sleep(BETWEEN)
    raise DovetailError(f"vLLM did not answer within {SECONDS:g} s")
