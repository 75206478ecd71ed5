"""The server process: sockets, limits of the protocol, and a drain on SIGTERM.

SIGTERM or SIGINT: new requests and /health are answered with 503, those in flight may finish within `drain_seconds`. The others
are aborted, their clients get an error, and the server ends. A second signal ends it at once. Where the engine has ended for
good, the server ends with EngineDead.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import resource
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn
from fastapi import FastAPI

from dovetail.base.errors import FileError
from dovetail.base.limits import REQUEST_HEADER_BYTES
from dovetail.serving.client import EngineDead
from dovetail.serving.http.connections import CONNECTIONS, bounded_protocol

BACKLOG = 2048
FILES = 512  # descriptors beside those of connections
ABORTED_SECONDS = 2.0  # in which aborted requests are answered


class Server(uvicorn.Server):
    """uvicorn, without its own signals: it would close the port at once, and end with the signal's exit code."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `run_server`."""
        yield


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 is a free one. FileError where it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # the protocol by its number: of other sockets asyncio sets no TCP_NODELAY, and every second write waits 40 ms
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        sock.close()
        raise FileError(f"{host}:{port}: cannot be bound ({error}); choose another --port") from error
    return sock


def make_server(app: FastAPI) -> Server:
    """Return a server of an app; connections.py bounds what clients hold open."""
    return Server(
        uvicorn.Config(
            app,
            http=bounded_protocol(app.state.service.options.address_connections),
            ws="none",
            lifespan="on",
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=REQUEST_HEADER_BYTES,
            limit_concurrency=CONNECTIONS,
            timeout_graceful_shutdown=3,
        )
    )


def allow_connections() -> None:
    """Raise the soft limit on file descriptors to what CONNECTIONS need, as far as the hard one allows: at the usual soft limit
    of 1,024 a server stops accepting."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = CONNECTIONS + FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


async def run_server(app: FastAPI, sock: socket.socket, drain_seconds: float, ready: Callable[[], None] | None = None) -> None:
    """Serve until a signal, then drain. `ready` is called once requests are accepted."""
    allow_connections()
    server, loop = make_server(app), asyncio.get_running_loop()
    ending, dead = asyncio.Event(), list[str]()

    def on_signal() -> None:
        if ending.is_set():
            server.should_exit = server.force_exit = True
        ending.set()

    async def drain() -> None:
        await ending.wait()
        if not await app.state.gate.drained(drain_seconds):
            app.state.service.abort_all()
            await app.state.gate.drained(ABORTED_SECONDS)
        server.should_exit = True

    async def watch() -> None:
        dead.append(await app.state.service.client.ended())
        await app.state.gate.drained(ABORTED_SECONDS)  # those in flight have their error by now
        server.should_exit = True

    async def announce() -> None:
        while not server.started:
            await asyncio.sleep(0.01)
        gc.collect()
        gc.freeze()  # modules and schemas stay: the collector would search them for a tenth of a second while requests wait
        if ready is not None:
            ready()

    signals = (signal.SIGTERM, signal.SIGINT)
    for one in signals:
        loop.add_signal_handler(one, on_signal)
    tasks = [asyncio.create_task(work) for work in (drain(), watch(), announce())]
    try:
        await server.serve([sock])
    finally:
        gc.unfreeze()  # the process may go on
        for task in tasks:
            task.cancel()
        for one in signals:
            loop.remove_signal_handler(one)
    if dead and not ending.is_set():
        raise EngineDead(f"{dead[0]}; --restart N starts it again")
