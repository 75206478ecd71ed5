"""The laws of servers on vLLM's own server, with a spec that our plugin runs in it (slow, on demand)."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from vllm_models import python
from vllm_specs import attention, case

import dovetail as dt
from dovetail.base.errors import DovetailError
from dovetail.decoding.generation import Vocabulary
from dovetail.proof.http import Http
from dovetail.text.learn import learn
from dovetail.text.tokenizer import END

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness.\n"
START_SECONDS = 600.0
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}


def exported(place: Path) -> Path:
    """A model with ALiBi in a window, sinks, another head size, no positions, QK-norm, soft-cap and sandwich norms."""
    torch.manual_seed(0)
    tokenizer = learn(TEXT * 20, 300)
    mixers = [
        attention(position="alibi", window=16, softcap=3.0),
        attention(3, 1, 96, sink=True),
        attention(position="none", qk_norm="rmsnorm"),
    ]
    spec = case(mixers, [{"wire": "sandwich_norm"}] * 3).spec
    model = dt.build(spec.set("vocab", tokenizer.size), seed=1).train()
    windows = tokenizer.encode(TEXT * 6).unfold(0, 48, 8)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(40):
        model.loss(windows).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.vocabulary = Vocabulary(tokenizer=tokenizer, stop=frozenset([tokenizer.id_of(END)]))
    dt.save(model.eval(), place / "own")
    return dt.export(place / "own", place / "exported", family="dovetail").directory


@contextlib.contextmanager
def served(directory: Path) -> Iterator[str]:
    """The URL of vLLM's server on a free port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = ["--dtype=float32", "--max-model-len=512", "--block-size=32", "--enforce-eager", "--enable-prompt-tokens-details"]
    command = [python(), "-m", "vllm.entrypoints.openai.api_server", f"--model={directory}", f"--port={port}", *flags]
    log = directory.parent / "log"
    environment = {**os.environ, **ENVIRONMENT}
    with (
        log.open("w") as out,
        subprocess.Popen([*command, "--host=127.0.0.1"], env=environment, stdout=out, stderr=out) as child,
    ):
        try:
            wait(f"http://127.0.0.1:{port}/v1", child, log)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            child.terminate()


def wait(url: str, child: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        assert child.poll() is None, log.read_text()[-4000:]
        with contextlib.suppress(DovetailError, OSError):
            Http(url).get("/models")
            return
        time.sleep(1)
    pytest.fail(f"no answer in {START_SECONDS:g} s: {log.read_text()[-4000:]}")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_law_of_servers_holds_with_the_plugin(tmp_path: Path) -> None:
    python()
    with served(exported(tmp_path)) as url:
        found = dt.laws(url).to_dict()
    states = {row["law"]: row["state"] for row in found["laws"]}
    assert states.pop("speculated") == "not applicable"  # it needs a second server
    assert len(states) == 12
    assert states == dict.fromkeys(states, "passed"), found


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_serve_starts_vllm_on_a_directory_of_ours(tmp_path: Path) -> None:
    exported(tmp_path)
    own, want = tmp_path / "own", dt.generate(tmp_path / "own", "It was the", max_tokens=24).text
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = [
        "--engine=vllm",
        f"--port={port}",
        "--dtype=float32",
        "--longest=256",
        "--api-key=secret",
        "--vllm-flag=--block-size=32",
    ]
    command = [str(python()), "-m", "dovetail", "serve", str(own), *flags, "--json"]
    with subprocess.Popen(command, env={**os.environ, **ENVIRONMENT}, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            url = json.loads(child.stdout.readline())["url"]
            asked = {"model": "own", "prompt": "It was the", "max_tokens": 24, "temperature": 0}
            body = json.dumps(asked).encode()
            head = {"Content-Type": "application/json", "Authorization": "Bearer secret"}
            with urllib.request.urlopen(urllib.request.Request(f"{url}/completions", body, head), timeout=120) as answer:
                assert json.load(answer)["choices"][0]["text"] == want
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(urllib.request.Request(f"{url}/completions", body, {"Content-Type": "application/json"}))
        finally:
            child.terminate()
        assert child.wait(120) == 0
