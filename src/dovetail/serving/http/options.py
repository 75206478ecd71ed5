"""Options of a server: the names of its models, who may ask, and its limits."""

from __future__ import annotations

import dataclasses as dc
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from dovetail.base.errors import UsageError, printable
from dovetail.base.limits import ADDRESS_CONNECTIONS
from dovetail.base.option import Option
from dovetail.base.option_group import OptionGroup
from dovetail.text.tool_calls.parser import parser_named

LOCAL = ("127.0.0.1", "localhost", "::1")
ANY = "*"
NAME = r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}$"  # of an adapter


@dc.dataclass(frozen=True, kw_only=True)
class HttpOptions(OptionGroup):
    """How a server answers, beside its engine."""

    metrics_prefix: Annotated[
        str, Option("The prefix of the names in /metrics; vllm gives those that its dashboards read.")
    ] = "dovetail"
    tool_parser: Annotated[
        str | None,
        Option("The format of tool calls: hermes or llama3; by default the one whose markers the chat template has."),
    ] = None
    drain_seconds: Annotated[float, Option("The seconds in which requests may finish after SIGTERM.", low=0.0, high=3600.0)] = (
        30.0
    )
    address_connections: Annotated[
        int,
        Option(
            "Connections that one address may have open; raise it behind a proxy, whose clients share its address.",
            low=1,
            high=65536,
        ),
    ] = ADDRESS_CONNECTIONS
    log_prompts: Annotated[bool, Option("Write the text of prompts to the log.")] = False


@dc.dataclass(frozen=True, kw_only=True)
class Options(HttpOptions):
    """What a server is started with."""

    models: Mapping[str, str | None]  # name in requests -> adapter of the engine; None: the model itself. The first is default
    version: str = "0"  # as /version shows it
    keys: tuple[str, ...] = ()  # API keys; without any, whoever reaches the port may ask
    hosts: tuple[str, ...] = ()  # names beside LOCAL that a Host header may have; "*" allows all
    origins: tuple[str, ...] = ()  # origins beside the server's own that a browser may send requests from
    adapter_root: Path | None = None  # the directory whose adapters administrators may load
    admin_keys: tuple[str, ...] = ()  # API keys of administrators

    def __post_init__(self) -> None:
        if not self.models:
            raise UsageError("models: no model has a name; give one")
        for name, adapter in self.models.items():
            if adapter is not None and not re.fullmatch(NAME, name):
                raise UsageError(f"--adapter: {printable(name, 80)!r} is no name; give letters, digits and . _ - / :")
        if self.adapter_root is not None and not self.admin_keys:
            raise UsageError("--adapter-root: needs --admin-key-file, so that nobody else reads directories of this machine")
        if any(not key or not key.isascii() or not key.isprintable() or " " in key for key in (*self.keys, *self.admin_keys)):
            raise UsageError("--api-key: is empty or holds a character that no HTTP header has; give printable ASCII")
        if not self.metrics_prefix.isidentifier():
            raise UsageError(f"--metrics-prefix: {self.metrics_prefix[:40]!r} is not a name; give letters, digits and _")
        if self.tool_parser is not None:
            parser_named(self.tool_parser)
        if not 0 <= self.drain_seconds <= 3600:
            raise UsageError(f"--drain-seconds: {self.drain_seconds:g} is not from 0 to 3,600")
        if self.address_connections < 1:
            raise UsageError(f"--address-connections: {self.address_connections} is not 1 or more")
