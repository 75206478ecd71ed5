"""serve: a model behind OpenAI's HTTP routes, until a signal ends it."""

from __future__ import annotations

import importlib.util
import ipaddress
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING, Annotated, Literal

from dovetail import __version__
from dovetail.api.options import (
    ALLOW_HOST,
    API_KEY,
    API_KEY_FILE,
    BUDGET,
    COMPILED,
    CONNECTIONS,
    HOST,
    LONGEST,
    POOLING,
    PORT,
    RESTART,
    ROWS,
    SERVED,
    SERVED_ADAPTER,
    SERVED_DTYPE,
    SERVED_NAME,
    SHARE,
    SPECULATE,
    InDir,
    InFile,
)
from dovetail.core.errors import FileError, UsageError, install_command
from dovetail.core.limits import ADDRESS_CONNECTIONS, QUEUED
from dovetail.core.option import Option
from dovetail.disk.untrusted import Directory, read_regular

if TYPE_CHECKING:
    from dovetail.serving.client import LogFormat

if TYPE_CHECKING:  # of the extra `serve`
    from fastapi import FastAPI

    from dovetail.api.engine import EngineOptions
    from dovetail.serving.http.options import Options
    from dovetail.serving.worker import ProcessClient

PACKAGES = ("fastapi", "uvicorn", "starlette", "prometheus_client")  # of the extra `serve`
KEY_FILE_BYTES = 1 << 16


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
    metrics_prefix: Annotated[
        str, Option("The prefix of the names in /metrics; vllm gives those that its dashboards read.")
    ] = "dovetail",
    tool_parser: Annotated[
        str | None,
        Option("The format of tool calls: hermes or llama3; by default the one whose markers the chat template has."),
    ] = None,
    drain_seconds: Annotated[
        float, Option("The seconds in which requests may finish after SIGTERM.", low=0.0, high=3600.0)
    ] = 30.0,
    address_connections: Annotated[int, CONNECTIONS] = ADDRESS_CONNECTIONS,
    log_format: Annotated[
        Literal["text", "json"], Option("The log on stderr: one line per request, as text or as a JSON object.")
    ] = "text",
    log_prompts: Annotated[bool, Option("Write the text of prompts to the log.")] = False,
    restart: Annotated[int, RESTART] = 0,
    rows: Annotated[int, ROWS] = 8,
    queued: Annotated[int, Option("Continuations that may wait; further requests get 429.", low=0, high=65536)] = QUEUED,
    longest: Annotated[int, LONGEST] = 4096,
    budget: Annotated[int, BUDGET] = 512,
    pages: Annotated[
        int | None, Option("Pages of 8 tokens in the KV cache; by default enough for all rows.", low=1, high=1 << 24)
    ] = None,
    cache: Annotated[Literal["int8", "int4", "fp8"] | None, Option("Store the KV cache in fewer bits.")] = None,
    share: Annotated[bool, SHARE] = True,
    speculate: Annotated[str | None, SPECULATE] = None,
    drafts: Annotated[
        int,
        Option("With --speculate: tokens that are guessed at once, with mtp one per depth or head at most.", low=1, high=64),
    ] = 4,
    compiled: Annotated[bool, COMPILED] = False,
    dtype: Annotated[Literal["float32", "bfloat16", "float16"] | None, SERVED_DTYPE] = None,
    threads: Annotated[int | None, Option("Threads of the engine on a CPU.", low=1, high=1024)] = None,
    pooling: Annotated[Literal["mean", "last", "cls"] | None, POOLING] = None,
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
    import asyncio

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
    from dovetail.decoding.embedding import check_embeds
    from dovetail.decoding.generation import generates
    from dovetail.hf.files import read_vocabulary
    from dovetail.hf.load import origin
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
