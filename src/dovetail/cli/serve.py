"""Serve a model by OpenAI's HTTP routes: completions, chats, models, tokens, metrics.

SIGTERM drains: new requests get 503, those in flight finish within --drain-seconds. On an address that other machines reach,
an API key is needed. It needs the extra `serve`.

    dovetail serve Qwen3-0.6B --port 8000
    dovetail serve Qwen3-0.6B --host 0.0.0.0 --api-key-file keys.txt --allow-host api.example.org
    dovetail serve Qwen3-0.6B --engine vllm --tensor 2 --vllm-flag=--gpu-memory-utilization=0.8

--engine vllm starts vLLM's own server in this environment, with the flags of ours that it has: it needs the extra `vllm`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated, Literal

from dovetail.base.errors import UsageError
from dovetail.base.option import Option, declared
from dovetail.cli.command import Options
from dovetail.cli.output import print_json, print_note

Engine = Annotated[
    Literal["native", "vllm"],
    Option("`native`: our own, which serves every model; `vllm`: vLLM, for fleets of GPUs."),
]
Json = Annotated[bool, Option("Print one JSON object with the URL on stdout, once requests are accepted.")]


def run(given: Options, engine: Engine = "native", json: Json = False) -> None:
    """Serve until a signal."""
    from dovetail.api.serve import serve
    from dovetail.api.serve_vllm import serve_vllm

    function = serve_vllm if engine == "vllm" else serve
    if foreign := sorted(given.keys() - declared(function).keys()):
        flag, other = foreign[0].replace("_", "-"), "native" if engine == "vllm" else "vllm"
        raise UsageError(f"--{flag}: is a flag of --engine {other}; leave it out, or choose that engine")
    if "adapter" in given:
        given["adapter"] = dict(given["adapter"])
    function(**given, ready=_report(json, given.get("log_format", "text")))


def _report(json: bool, log_format: str) -> Callable[[str], None]:
    """Return the function that reports the URL once requests are accepted."""

    def ready(url: str) -> None:
        if json:
            print_json({"url": f"{url}/v1"})
            sys.stdout.flush()
        elif log_format == "text":
            print_note(f"{url}/v1: ready")

    return ready
