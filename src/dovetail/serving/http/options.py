"""Options of a server: the names of its models, who may ask, and its limits."""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Mapping

from dovetail.core.errors import UsageError

LOCAL = ("127.0.0.1", "localhost", "::1")
ANY = "*"


@dc.dataclass(frozen=True, kw_only=True)
class Options:
    """What a server is started with."""

    models: Mapping[str, str | None]  # name in requests -> adapter of the engine; None: the model itself. The first is default
    version: str = "0"  # as /version shows it
    keys: tuple[str, ...] = ()  # API keys; without any, whoever reaches the port may ask
    hosts: tuple[str, ...] = ()  # names beside LOCAL that a Host header may have; "*" allows all
    origins: tuple[str, ...] = ()  # origins beside the server's own that a browser may send requests from
    metrics_prefix: str = "dovetail"  # "vllm": the names that vLLM's dashboards read
    drain_seconds: float = 30.0  # in which requests may finish after SIGTERM

    def __post_init__(self) -> None:
        if not self.models:
            raise UsageError("models: no model has a name; give one")
        for key in self.keys:
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise UsageError("--api-key: is empty or holds a character that no HTTP header has; give printable ASCII")
        if not self.metrics_prefix.isidentifier():
            raise UsageError(f"--metrics-prefix: {self.metrics_prefix[:40]!r} is not a name; give letters, digits and _")
        if not 0 <= self.drain_seconds <= 3600:
            raise UsageError(f"--drain-seconds: {self.drain_seconds:g} is not from 0 to 3,600")
