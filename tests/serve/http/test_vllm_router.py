"""vllm.yaml: its flags are those of vLLM's and of the router's own parsers; that router, before two `dovetail serve` processes,
passes keys and streams on, and sends prompts that begin alike to one (slow, on demand: benchmarks/peers/make router, vllm)."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml
from http_server import TEMPLATE, TEXT
from prometheus_client.parser import text_string_to_metric_families
from real_server import real_server, write_directory

ROOT = Path(__file__).parents[3]
ROUTER, VLLM = ROOT / ".peers/router", ROOT / ".peers/vllm"
KEY = {"Authorization": "Bearer a-key"}
PARSE_ROUTER = """
import argparse, dataclasses, json, sys
from vllm_router.router_args import RouterArgs
parser = argparse.ArgumentParser()
RouterArgs.add_cli_args(parser, use_router_prefix=False)
parsed = RouterArgs.from_cli_args(parser.parse_args(sys.argv[1:]), use_router_prefix=False)
print(json.dumps(dataclasses.asdict(parsed)))
"""
PARSE_VLLM = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parsed = vars(make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[1:]))
print(json.dumps({name: parsed[name] for name in ("model_tag", "served_model_name", "max_num_seqs", "enable_prefix_caching")}))
"""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def command(name: str) -> list[str]:
    documents = yaml.safe_load_all((ROOT / "deploy/kubernetes/vllm.yaml").read_text())
    (one,) = (one for one in documents if (one["kind"], one["metadata"]["name"]) == ("Deployment", name))
    return one["spec"]["template"]["spec"]["containers"][0]["command"]


def parsed(place: Path, script: str, args: list[str]) -> dict[str, Any]:
    if not (place / "ready").exists():
        pytest.skip(f"bash benchmarks/peers/make {place.name}")
    run = [str(place / "bin/python"), "-c", script, *args]
    done = subprocess.run(run, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_flags_of_the_router_are_its_own() -> None:
    program, *args = command("dovetail-router")
    assert program == "vllm-router"
    found = parsed(ROUTER, PARSE_ROUTER, args)
    assert (found["policy"], found["selector"]) == ("cache_aware", {"app": "dovetail-vllm"})
    assert found["service_discovery"]


def test_the_flags_of_vllm_are_its_own() -> None:
    vllm, serve, *args = command("dovetail-vllm")
    assert (vllm, serve) == ("vllm", "serve")
    found = parsed(VLLM, PARSE_VLLM, args)
    assert (found["model_tag"], found["served_model_name"]) == ("/models/mixed-vllm", ["mixed"])
    assert (found["max_num_seqs"], found["enable_prefix_caching"]) == (64, True)


@contextlib.contextmanager
def routed(servers: list[str], log: Path) -> Iterator[httpx2.Client]:
    """The router with the flags of the manifest, but for how it finds servers, its address and its ports."""
    ports = []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as free:
            ports.append(free.getsockname()[1])
    kept = [word for word in command("dovetail-router")[1:] if not word.startswith(("--host", "--port", "--se"))]
    here = ["--host=127.0.0.1", f"--port={ports[0]}", "--prometheus-host=127.0.0.1", f"--prometheus-port={ports[1]}"]
    run = [str(ROUTER / "bin/vllm-router"), *kept, *here, "--worker-urls", *servers]
    with log.open("w") as out, subprocess.Popen(run, stdout=out, stderr=out, env={**os.environ, "NO_PROXY": "*"}) as process:
        try:
            with httpx2.Client(base_url=f"http://127.0.0.1:{ports[0]}", headers=KEY, timeout=120) as client:
                end = time.monotonic() + 120
                while time.monotonic() < end:
                    assert process.poll() is None, log.read_text()[-3000:]
                    with contextlib.suppress(httpx2.HTTPError):
                        if client.get("/v1/models").status_code == 200:
                            break
                    time.sleep(0.5)
                yield client
        finally:
            process.kill()


def metric(url: str, name: str) -> float:
    page = httpx2.get(f"{url}/metrics", headers=KEY).text
    samples = [one for family in text_string_to_metric_families(page) for one in family.samples]
    return sum(one.value for one in samples if one.name == f"vllm:{name}")


@pytest.mark.skipif(not (ROUTER / "ready").exists(), reason="bash benchmarks/peers/make router")
def test_the_router_before_two_servers(trained, tmp_path: Path) -> None:
    directory = write_directory(*trained, tmp_path / "tiny", TEMPLATE)
    (tmp_path / "keys").write_text("a-key\n-\n")  # the second is that of real_server's client
    flags = ["--metrics-prefix=vllm", f"--api-key-file={tmp_path / 'keys'}"]
    body = {"model": "tiny", "max_tokens": 12, "temperature": 0}
    with real_server(directory, *flags) as first, real_server(directory, *flags) as second:
        urls = [first.url, second.url]
        prompts = [TEXT[begin : begin + 20] for begin in range(0, 32, 4)]
        first.http.headers.update(KEY)
        alone = [first.complete(prompt=prompt).json()["choices"][0]["text"] for prompt in prompts]
        with routed(urls, tmp_path / "log") as client:
            assert client.get("/liveness").status_code == 200, "the probe of the manifest"
            whole = [client.post("/v1/completions", json={**body, "prompt": prompt}) for prompt in prompts]
            assert [one.json()["choices"][0]["text"] for one in whole] == alone
            other = {"Authorization": "Bearer wrong"}
            assert client.post("/v1/completions", json={**body, "prompt": "the"}, headers=other).status_code == 401
            stream = client.post("/v1/completions", json={**body, "prompt": prompts[0], "stream": True}).text.split("\n\n")
            assert "".join(json.loads(event[6:])["choices"][0]["text"] for event in stream[:-2]) == alone[0]
            before = [metric(url, "prompt_tokens_total") for url in urls]
            hits = 0
            for number in range(6):
                usage = client.post("/v1/completions", json={**body, "prompt": f"again: {TEXT * 4} {number}"}).json()["usage"]
                hits += usage["prompt_tokens_details"]["cached_tokens"] > 0
            assert hits == 5, "all but the first"
            assert sum(metric(url, "prompt_tokens_total") > old for url, old in zip(urls, before, strict=True)) == 1
