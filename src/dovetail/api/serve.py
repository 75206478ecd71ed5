"""serve: a model behind OpenAI's HTTP routes, until a signal ends it."""

from __future__ import annotations

import dataclasses as dc
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING, Annotated, Literal

from dovetail import __version__
from dovetail.api.engine_options import EngineOptions
from dovetail.api.options import (
    ALLOW_HOST,
    API_KEY,
    API_KEY_FILE,
    HOST,
    PORT,
    RESTART,
    SERVED,
    SERVED_ADAPTER,
    SERVED_NAME,
    InDir,
    InFile,
)
from dovetail.base.limits import QUEUED
from dovetail.base.option import Option
from dovetail.base.option_group import accepts_groups
from dovetail.disk.untrusted import Directory
from dovetail.serving.http.access import check_exposed, check_extra, read_keys, url_of
from dovetail.serving.http.options import HttpOptions, Options

if TYPE_CHECKING:
    from fastapi import FastAPI  # of the extra `serve`

    from dovetail.serving.client import LogFormat
    from dovetail.serving.worker import ProcessClient


@accepts_groups
def serve(
    model: Annotated[str | Path, SERVED],
    *,
    host: Annotated[str, HOST] = "127.0.0.1",
    port: Annotated[int, PORT] = 8000,
    name: Annotated[str | None, SERVED_NAME] = None,
    api_key: Annotated[Sequence[str], API_KEY] = (),
    api_key_file: Annotated[str | Path | None, API_KEY_FILE] = None,
    allow_host: Annotated[Sequence[str], ALLOW_HOST] = (),
    allow_origin: Annotated[
        Sequence[str],
        Option("An origin of web pages that may send requests; may be given many times.", form="ORIGIN", repeat=True),
    ] = (),
    adapter: Annotated[Mapping[str, str | Path] | None, SERVED_ADAPTER] = None,
    adapter_root: Annotated[
        str | Path | None, InDir("A directory whose adapters requests may load, with a key of --admin-key-file.")
    ] = None,
    admin_key_file: Annotated[
        str | Path | None, InFile("A file with one key per line, of administrators who may load and unload adapters.")
    ] = None,
    http: HttpOptions = HttpOptions(),
    log_format: Annotated[
        Literal["text", "json"], Option("The log on stderr: one line per request, as text or as a JSON object.")
    ] = "text",
    restart: Annotated[int, RESTART] = 0,
    queued: Annotated[int, Option("Continuations that may wait; further requests get 429.", low=0, high=65536)] = QUEUED,
    options: EngineOptions = EngineOptions(),
    ready: Callable[[str], None] | None = None,
) -> None:
    """Serve the model of a directory until SIGTERM or SIGINT, then drain.

    `name` is the model's name in requests; that of the directory by default. A server on an address that other machines reach
    needs a key: `api_key`, or the lines of `api_key_file`. `adapter` are directories of adapters by the names that requests
    give as their model; those in `adapter_root` can be loaded by requests with a key of `admin_key_file`. `ready` is called
    with the URL once requests are accepted. The log on stderr has one line per request (`log_format`: text, or JSON lines).
    `http` says how the server answers, for example the format of tool calls. An engine that ends by itself is started again
    up to `restart` times; then the server raises EngineDead. Up to `queued` continuations wait; further requests get 429.
    `options` are those of the engine, also one by one: `rows=16`.
    """
    import asyncio

    check_extra()
    from dovetail.serving.http.log import logging_to_stderr
    from dovetail.serving.http.server import bound_socket

    adapters = {requested: str(directory) for requested, directory in (adapter or {}).items()}
    server = Options(
        models={name or Path(model).resolve().name: None, **dict(zip(adapters, adapters, strict=True))},
        version=__version__,
        keys=(*api_key, *(() if api_key_file is None else read_keys(api_key_file))),
        hosts=tuple(allow_host),
        origins=tuple(allow_origin),
        adapter_root=None if adapter_root is None else Directory(adapter_root).place,
        admin_keys=() if admin_key_file is None else tuple(read_keys(admin_key_file)),
        **vars(http),
    )
    check_exposed(host, server.keys)
    options = dc.replace(options, adapters={**options.adapters, **adapters})
    with bound_socket(host, port) as sock, logging_to_stderr(log_format):  # a port that is taken is an error at once
        url = url_of(host, sock.getsockname()[1])
        asyncio.run(_serve(model, sock, server, lambda: _report(ready, url, log_format), options, queued, restart))


@asynccontextmanager
async def open_app(
    model: str | Path, options: Options, engine: EngineOptions, *, queued: int = QUEUED, restart: int = 0
) -> AsyncGenerator[FastAPI, None]:
    """Start the engine of a model directory; yield its app, without a socket; end the engine. It is started again up to
    `restart` times where it ends by itself."""
    from dovetail.api.engine import start_engine
    from dovetail.decoding.embedding import check_embeds
    from dovetail.decoding.generation import generates
    from dovetail.hf.files import read_vocabulary
    from dovetail.hf.origin import origin
    from dovetail.serving.http.app import make_app
    from dovetail.serving.restart import RestartingClient

    where = Directory(model)
    spec = origin(where).spec
    if not generates(spec):
        check_embeds(spec)

    async def start() -> ProcessClient:
        return await start_engine(where.place, engine, queued=queued)

    client = RestartingClient(await start(), start, restart)
    try:
        yield make_app(client, read_vocabulary(where), options)
    finally:
        await client.close()


async def _serve(
    model: str | Path,
    sock: socket,
    options: Options,
    ready: Callable[[], None],
    engine: EngineOptions,
    queued: int,
    restart: int,
) -> None:
    from dovetail.serving.http.server import run_server

    async with open_app(model, options, engine, queued=queued, restart=restart) as app:
        await run_server(app, sock, options.drain_seconds, ready)


def _report(ready: Callable[[str], None] | None, url: str, log_format: LogFormat) -> None:
    if log_format == "json":
        from dovetail.serving.client import LOG

        LOG.info("%s/v1: ready", url)
    if ready is not None:
        ready(url)
