"""Serve a model by OpenAI's HTTP routes: completions, chats, models, tokens, metrics.

SIGTERM drains: new requests get 503, those in flight finish within --drain-seconds. On an address that other machines reach,
an API key is needed. It needs the extra `serve`.

    dovetail serve Qwen3-0.6B --port 8000
    dovetail serve Qwen3-0.6B --host 0.0.0.0 --api-key-file keys.txt --allow-host api.example.org
    dovetail serve Qwen3-0.6B --engine vllm --tensor 2 --vllm-flag=--gpu-memory-utilization=0.8

--engine vllm starts vLLM's own server in this environment, with the flags of ours that it has: it needs the extra `vllm`.
"""

from __future__ import annotations

import dataclasses as dc
import inspect
import sys
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal

import tyro

from dovetail.cli.flags import InDir, InFile, LoadFlags, number, whole
from dovetail.cli.output import print_json, print_note
from dovetail.cli.printing import options
from dovetail.core.errors import UsageError
from dovetail.core.limits import ADDRESS_CONNECTIONS, MAX_LENGTH

VLLM = frozenset({"tensor", "vllm_flag"})  # flags that the native engine does not have
Texts = Annotated[tuple[str, ...], tyro.conf.UseAppendAction]


@dc.dataclass
class Command(LoadFlags):
    """The model, the address, and access."""

    model: tyro.conf.Positional[InDir]
    """A model directory: ours, or in Hugging Face layout."""
    engine: Literal["native", "vllm"] = "native"
    """`native`: our own, which serves every model; `vllm`: vLLM, for fleets of GPUs."""
    host: str = "127.0.0.1"
    """The address to listen on."""
    port: Annotated[int, whole(0, 65535)] = 8000
    """The port; 0 picks a free one."""
    name: str | None = None
    """The name of the model in requests; that of the directory by default."""
    api_key: Annotated[Texts, tyro.conf.arg(metavar="KEY")] = ()
    """A key that requests must send as a bearer token; may be given many times. Other users of the machine can read it in the
    list of processes: --api-key-file hides it."""
    api_key_file: InFile | None = None
    """A file with one API key per line."""
    allow_host: Annotated[Texts, tyro.conf.arg(metavar="NAME")] = ()
    """A host name besides localhost under which the server may be reached; * allows all; may be given many times."""
    allow_origin: Annotated[Texts, tyro.conf.arg(metavar="ORIGIN")] = ()
    """An origin of web pages that may send requests; may be given many times."""
    adapter: Annotated[Texts, tyro.conf.arg(metavar="NAME=DIR")] = ()
    """An adapter that requests name as their model; may be given many times."""
    adapter_root: InDir | None = None
    """A directory whose adapters requests may load, with a key of --admin-key-file."""
    admin_key_file: InFile | None = None
    """A file with one key per line, of administrators who may load and unload adapters."""
    metrics_prefix: str = "dovetail"
    """The prefix of the names in /metrics; vllm gives those that its dashboards read."""
    pooling: Literal["mean", "last", "cls"] | None = None
    """The pooling of embeddings; by default that of the model's head, else the last token of a causal model and the mean."""
    tool_parser: str | None = None
    """The format of tool calls: hermes or llama3; by default the one whose markers the chat template has."""
    drain_seconds: Annotated[float, number(0, 3600)] = 30.0
    """The seconds in which requests may finish after SIGTERM."""
    address_connections: Annotated[int, whole(1, 65536)] = ADDRESS_CONNECTIONS
    """Connections that one address may have open; raise it behind a proxy, whose clients share its address."""
    log_format: Literal["text", "json"] = "text"
    """The log on stderr: one line per request, as text or as a JSON object."""
    log_prompts: bool = False
    """Write the text of prompts to the log."""
    restart: Annotated[int, whole(0, 1000)] = 0
    """How often an engine that has ended by itself is started again; then the server ends with an error."""
    rows: Annotated[int, whole(1, 1024)] = 8
    """Continuations that run at once."""
    queued: Annotated[int, whole(0, 65536)] = 64
    """Continuations that may wait; further requests get 429."""
    longest: Annotated[int, whole(2, MAX_LENGTH)] = 4096
    """Tokens of a prompt and its continuation together."""
    budget: Annotated[int, whole(1, 1 << 20)] = 512
    """Tokens per step of the model: longer prompts are computed in chunks, together with requests that decode."""
    pages: Annotated[int, whole(1, 1 << 24)] | None = None
    """Pages of 8 tokens in the KV cache; by default enough for all rows."""
    cache: Literal["int8", "int4", "fp8"] | None = None
    """Store the KV cache in fewer bits."""
    share: bool = True
    """Keep the KV cache of prompts for later requests with the same prefix."""
    speculate: str | None = None
    """`lookup`: draft the next tokens from those before; `mtp`: by the model's own multi-token prediction or Medusa heads; or
    the directory of a smaller model that guesses them."""
    drafts: Annotated[int, whole(1, 64)] = 4
    """With --speculate: tokens that are guessed at once, with mtp one per depth or head at most."""
    compiled: bool = False
    """Decode with a compiled graph: it takes a minute or more to compile at the start, and holds the weights a second time."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """The dtype of the weights; that of the files by default."""
    threads: Annotated[int, whole(1, 1024)] | None = None
    """Threads of the engine on a CPU."""
    tensor: Annotated[int, whole(1, 1024)] = 1
    """--engine vllm: ranks of tensor parallelism."""
    vllm_flag: Annotated[Texts, tyro.conf.arg(metavar="--FLAG=VALUE")] = ()
    """--engine vllm: a further flag of its server; may be given many times."""
    json: bool = False
    """Print one JSON object with the URL on stdout, once requests are accepted."""

    def run(self) -> int:
        """Serve until a signal."""
        default = {field.name: field.default for field in dc.fields(self)}
        given = {name: value for name, value in options(self, "load", "json", "engine").items() if value != default[name]}
        (self._by_vllm if self.engine == "vllm" else self._native)(given)
        return 0

    def _native(self, given: Mapping[str, Any]) -> None:
        from dovetail.api.serve import serve

        self._refuse(given.keys() & VLLM, "vllm")
        own = options(self, "load", "json", "engine", "adapter", *VLLM)
        serve(**own, adapter=dict(map(_named, self.adapter)), ready=self._ready)

    def _by_vllm(self, given: Mapping[str, Any]) -> None:
        from dovetail.api.serve_vllm import serve_vllm

        self._refuse(given.keys() - inspect.signature(serve_vllm).parameters.keys(), "native")
        serve_vllm(**given, ready=self._ready)

    def _refuse(self, names: Collection[str], engine: str) -> None:
        for name in sorted(names):
            flag = name.replace("_", "-")
            raise UsageError(f"--{flag}: is a flag of --engine {engine}; leave it out, or choose that engine")

    def _ready(self, url: str) -> None:
        if self.json:
            print_json({"url": f"{url}/v1"})
            sys.stdout.flush()
        elif self.log_format == "text":
            print_note(f"{url}/v1: ready")


def _named(text: str) -> tuple[str, str]:
    """(name, directory) of NAME=DIR."""
    name, equals, place = text.partition("=")
    if not (name and equals and place):
        raise UsageError(f"--adapter: {text!r} is not NAME=DIR")
    return name, place
