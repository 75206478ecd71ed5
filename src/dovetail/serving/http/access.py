"""Who may ask a server: its API keys, the addresses that need one, and its URL. Needs no package of the extra `serve`."""

from __future__ import annotations

import importlib.util
import ipaddress
from collections.abc import Sequence
from pathlib import Path

from dovetail.base.errors import FileError, UsageError, install_command
from dovetail.disk.untrusted import read_regular

PACKAGES = ("fastapi", "uvicorn", "starlette", "prometheus_client")  # of the extra `serve`
KEY_FILE_BYTES = 1 << 16


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


def check_extra() -> None:
    """Raise where a package of the extra `serve` is missing."""
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
