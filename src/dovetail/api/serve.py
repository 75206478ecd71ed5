"""serve: a model behind OpenAI's HTTP routes, until a signal ends it."""

from __future__ import annotations

import asyncio
import importlib.util
import ipaddress
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING

from dovetail import __version__
from dovetail.core.errors import FileError, UsageError, install_command
from dovetail.core.limits import ADDRESS_CONNECTIONS
from dovetail.decoding.embedding import Pooling, check_embeds
from dovetail.decoding.generation import generates
from dovetail.disk.untrusted import Directory, read_regular
from dovetail.hf.load import origin
from dovetail.hf.vocabulary import read_vocabulary
from dovetail.serving.client import LogFormat
from dovetail.serving.worker import QUEUED
from dovetail.state.quantized import CacheFormat

if TYPE_CHECKING:  # of the extra `serve`
    from fastapi import FastAPI

    from dovetail.api.engine import EngineOptions
    from dovetail.serving.http.options import Options
    from dovetail.serving.worker import ProcessClient

PACKAGES = ("fastapi", "uvicorn", "starlette", "prometheus_client")  # of the extra `serve`
KEY_FILE_BYTES = 1 << 16


def serve(
    model: str | Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    name: str | None = None,
    api_key: Sequence[str] = (),
    api_key_file: str | Path | None = None,
    allow_host: Sequence[str] = (),
    allow_origin: Sequence[str] = (),
    adapter: Mapping[str, str | Path] | None = None,
    adapter_root: str | Path | None = None,
    admin_key_file: str | Path | None = None,
    metrics_prefix: str = "dovetail",
    tool_parser: str | None = None,
    drain_seconds: float = 30.0,
    address_connections: int = ADDRESS_CONNECTIONS,
    log_format: LogFormat = "text",
    log_prompts: bool = False,
    restart: int = 0,
    rows: int = 8,
    queued: int = QUEUED,
    longest: int = 4096,
    budget: int = 512,
    pages: int | None = None,
    cache: CacheFormat | None = None,
    share: bool = True,
    speculate: str | None = None,
    drafts: int = 4,
    compiled: bool = False,
    dtype: str | None = None,
    threads: int | None = None,
    pooling: Pooling | None = None,
    ready: Callable[[str], None] | None = None,
) -> None:
    """Serve the model of a directory until SIGTERM or SIGINT, then drain.

    `name` is the model's name in requests; that of the directory by default. A server on an address that other machines reach
    needs a key: `api_key`, or the lines of `api_key_file`. `adapter` are directories of adapters by the names that requests
    give as their model; those in `adapter_root` can be loaded by requests with a key of `admin_key_file`. `tool_parser` is the
    format of tool calls; that of the chat template by default. `address_connections` is how many connections one address may
    have open; clients behind a proxy share its address. `ready` is called with the URL once requests are accepted.
    The log on stderr has one line per request (`log_format`: text, or JSON lines), without the text of prompts unless
    `log_prompts`. An engine that ends by itself is started again up to `restart` times; then the server raises EngineDead.
    Up to `queued` continuations wait; further requests get 429. The options from `rows` to `pooling` are those of the engine
    (`api.engine.EngineOptions`).
    """
    options = server_options(
        model,
        name=name,
        api_key=api_key,
        api_key_file=api_key_file,
        allow_host=allow_host,
        allow_origin=allow_origin,
        adapter=adapter,
        adapter_root=adapter_root,
        admin_key_file=admin_key_file,
        metrics_prefix=metrics_prefix,
        tool_parser=tool_parser,
        drain_seconds=drain_seconds,
        address_connections=address_connections,
        log_prompts=log_prompts,
    )
    check_exposed(host, options.keys)
    from dovetail.api.engine import EngineOptions
    from dovetail.serving.http.log import logging_to_stderr
    from dovetail.serving.http.server import bound_socket

    engine = EngineOptions(
        rows=rows,
        longest=longest,
        budget=budget,
        pages=pages,
        cache=cache,
        share=share,
        speculate=speculate,
        drafts=drafts,
        compiled=compiled,
        dtype=dtype,
        threads=threads,
        pooling=pooling,
        adapters={adapter_name: str(directory) for adapter_name, directory in (adapter or {}).items()},
    )
    sock = bound_socket(host, port)  # before the weights are read: a port that is taken is an error at once
    try:
        url = url_of(host, sock.getsockname()[1])
        with logging_to_stderr(log_format):
            asyncio.run(_serve(model, sock, options, lambda: _report(ready, url, log_format), engine, queued, restart))
    finally:
        sock.close()


def server_options(
    model: str | Path,
    *,
    name: str | None = None,
    api_key: Sequence[str] = (),
    api_key_file: str | Path | None = None,
    allow_host: Sequence[str] = (),
    allow_origin: Sequence[str] = (),
    adapter: Mapping[str, str | Path] | None = None,
    adapter_root: str | Path | None = None,
    admin_key_file: str | Path | None = None,
    metrics_prefix: str = "dovetail",
    tool_parser: str | None = None,
    drain_seconds: float = 30.0,
    address_connections: int = ADDRESS_CONNECTIONS,
    log_prompts: bool = False,
) -> Options:
    """Return the options of a server of a model directory: those of `serve`, with the keys read."""
    _check_extra()
    from dovetail.serving.http.options import Options

    return Options(
        models={name or Path(model).resolve().name: None, **{one: one for one in adapter or {}}},
        version=__version__,
        keys=(*api_key, *(() if api_key_file is None else read_keys(api_key_file))),
        hosts=tuple(allow_host),
        origins=tuple(allow_origin),
        adapter_root=None if adapter_root is None else Directory(adapter_root).place,
        admin_keys=() if admin_key_file is None else tuple(read_keys(admin_key_file)),
        metrics_prefix=metrics_prefix,
        tool_parser=tool_parser,
        drain_seconds=drain_seconds,
        address_connections=address_connections,
        log_prompts=log_prompts,
    )


@asynccontextmanager
async def open_app(
    model: str | Path, options: Options, engine: EngineOptions, *, queued: int = QUEUED, restart: int = 0
) -> AsyncGenerator[FastAPI, None]:
    """Start the engine of a model directory; yield its app, without a socket; end the engine. It is started again up to
    `restart` times where it ends by itself."""
    from dovetail.api.engine import start_engine
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


def read_keys(path: str | Path) -> list[str]:
    """Return the API keys of a file: one per line; empty lines and lines that begin with # are left out."""
    text = read_regular(Path(path), KEY_FILE_BYTES, "API keys")
    keys = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if not keys:
        raise FileError(f"{path}: holds no API key; write one per line")
    return keys


def url_of(host: str, port: int) -> str:
    """The URL of a server."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _check_extra() -> None:
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"serve: needs the package {missing[0]}: {install_command('serve')}")


def check_exposed(host: str, keys: Sequence[str]) -> None:
    """Raise where other machines could ask without a key."""
    try:
        local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = False
    if not local and not keys:
        raise UsageError(f"--host {host}: other machines reach this address; give --api-key or --api-key-file")


def _report(ready: Callable[[str], None] | None, url: str, log_format: LogFormat) -> None:
    if log_format == "json":
        from dovetail.serving.client import LOG

        LOG.info("%s/v1: ready", url)
    if ready is not None:
        ready(url)
