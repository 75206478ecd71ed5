"""serve: a model behind OpenAI's HTTP routes, until a signal ends it."""

from __future__ import annotations

import asyncio
import importlib.util
import ipaddress
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dovetail import __version__
from dovetail.core.errors import FileError, UsageError
from dovetail.embedding import check_embeds
from dovetail.generation import generates
from dovetail.io.untrusted import Directory, read_regular
from dovetail.port.load import origin
from dovetail.port.vocabulary import read_vocabulary

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
    ready: Callable[[str], None] | None = None,
    **engine: Any,
) -> None:
    """Serve the model of a directory until SIGTERM or SIGINT, then drain.

    `name` is the model's name in requests; that of the directory by default. A server on an address that other machines reach
    needs a key: `api_key`, or the lines of `api_key_file`. `adapter` are directories of adapters by the names that requests
    give as their model; those in `adapter_root` can be loaded by requests with a key of `admin_key_file`. `tool_parser` is the
    format of tool calls; that of the chat template by default. `ready` is called with the URL once requests are accepted.
    `engine` are options of the engine (`api.engine.start_engine`).
    """
    _check_extra()
    from dovetail.serving.http.options import Options
    from dovetail.serving.http.server import bound_socket

    keys = (*api_key, *(() if api_key_file is None else read_keys(api_key_file)))
    check_exposed(host, keys)
    adapters = dict(adapter or {})
    options = Options(
        models={name or Path(model).resolve().name: None, **{one: one for one in adapters}},
        version=__version__,
        keys=keys,
        hosts=tuple(allow_host),
        origins=tuple(allow_origin),
        adapter_root=None if adapter_root is None else Directory(adapter_root).place,
        admin_keys=() if admin_key_file is None else tuple(read_keys(admin_key_file)),
        metrics_prefix=metrics_prefix,
        tool_parser=tool_parser,
        drain_seconds=drain_seconds,
    )
    where = Directory(model)
    spec = origin(where).spec
    if not generates(spec):
        check_embeds(spec)
    sock = bound_socket(host, port)  # before the weights are read: a port that is taken is an error at once
    engine = {**engine, "adapters": {one: str(place) for one, place in adapters.items()}}
    try:
        asyncio.run(_serve(where, sock, options, lambda: _report(ready, url_of(host, sock.getsockname()[1])), engine))
    finally:
        sock.close()


async def _serve(where: Directory, sock: Any, options: Any, ready: Callable[[], None], engine: dict[str, Any]) -> None:
    from dovetail.api.engine import start_engine
    from dovetail.serving.http.app import make_app
    from dovetail.serving.http.server import run_server

    client = await start_engine(where.place, **engine)
    try:
        app = make_app(client, read_vocabulary(where), options)
        await run_server(app, sock, options.drain_seconds, ready)
    finally:
        await client.close()


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
        raise UsageError(f'serve: needs the package {missing[0]}: pip install "dovetail[serve]"')


def check_exposed(host: str, keys: Sequence[str]) -> None:
    """Raise where other machines could ask without a key."""
    try:
        local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = False
    if not local and not keys:
        raise UsageError(f"--host {host}: other machines reach this address; give --api-key or --api-key-file")


def _report(ready: Callable[[str], None] | None, url: str) -> None:
    if ready is not None:
        ready(url)
