"""Replicas on a Ray cluster of its own: `serve run` with the files of deploy/ray, in the environment of
benchmarks/peers/make ray."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import yaml
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[3]
BIN = ROOT / ".peers/ray/bin"
DEPLOY = ROOT / "deploy/ray"
KEY = "key-of-a-tenant"
DEFAULT_ROUTER = "ray.serve._private.request_router:PowerOfTwoChoicesRequestRouter"
START_SECONDS = 900.0  # minutes on a busy machine
# the command `serve`, on a cluster without Ray's dashboard, whose ten processes take minutes on two busy cores; Ray gives
# its own daemons 30 s to start, which may be too few there
SERVE = """
import ray, ray.serve.scripts
for left in reversed(range(5)):
    try:
        ray.init(namespace="serve", num_cpus=2, include_dashboard=False)
        break
    except Exception:
        ray.shutdown()
        if not left:
            raise
ray.serve.scripts.cli()
"""


class Replicas:
    """A running application, and clients of it."""

    def __init__(self, port: int, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process, self.log, self.url = process, log, f"http://127.0.0.1:{port}"
        self.http = httpx2.Client(base_url=self.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=300)
        self.openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, timeout=300)

    def complete(self, **fields: Any) -> dict[str, Any]:
        answer = self.http.post(
            "/v1/completions", json={"temperature": 0, "max_tokens": 12, "return_token_ids": True, **fields}
        )
        assert answer.status_code == 200, answer.text
        return answer.json()

    def metric(self, name: str) -> dict[str, float]:
        """A metric of each replica."""
        page = self.http.get("/metrics")
        assert page.status_code == 200, page.text
        samples = [one for family in text_string_to_metric_families(page.text) for one in family.samples]
        return {one.labels["replica"]: one.value for one in samples if one.name == f"dovetail:{name}"}

    def wait(self, what: Any, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            with contextlib.suppress(httpx2.HTTPError):
                if what():
                    return
            time.sleep(0.2)
        raise AssertionError(f"not within {seconds:g} s: {self.log.read_text()[-4000:]}")

    def engine_workers(self) -> list[int]:
        """Process ids of the replicas: workers of Ray below the process that was started here."""
        parents, names = {}, {}
        for place in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                parents[int(place.name)] = int((place / "stat").read_text().rpartition(")")[2].split()[1])
                names[int(place.name)] = (place / "cmdline").read_bytes().decode(errors="replace")

        def ours(process: int) -> bool:
            while process > 1:
                if process == self.process.pid:
                    return True
                process = parents.get(process, 0)
            return False

        return [id for id, name in names.items() if name.startswith("ray::ServeReplica:dovetail:Engine") and ours(id)]


@contextlib.contextmanager
def replicas(directory: Path, place: Path, router: str | None = None) -> Iterator[Replicas]:
    """The application of deploy/ray/serve.yaml with a model; `router` replaces the prefix-aware one."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place.mkdir()
    keys, file, log = place / "keys", place / "serve.yaml", place / "log"
    keys.write_text(f"{KEY}\nkey-of-another\n")
    config = yaml.safe_load((DEPLOY / "serve.yaml").read_text())
    (app,) = config["applications"]
    config["http_options"]["port"] = port
    app["args"] |= {"model": str(directory), "name": "tiny", "api_key_file": str(keys), "threads": 1}
    (engine,) = (one for one in app["deployments"] if one["name"] == "Engine")
    if router is not None:
        engine["request_router_config"] = {"request_router_class": router}
    file.write_text(yaml.safe_dump(config))
    short = tempfile.mkdtemp(prefix="ray")  # names of sockets have at most 107 bytes
    token = Path(short) / "token"
    token.write_text(secrets.token_hex(32))
    env = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}:{DEPLOY}",
        "OMP_NUM_THREADS": "1",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),  # else Ray writes one to the home directory
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # listen on 127.0.0.1 alone, as Ray does by default on those systems
        "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",  # a busy machine is no dead proxy
        "RAY_TMPDIR": short,
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    with log.open("wb") as out:
        command = [str(BIN / "python"), "-c", SERVE, "run", "--app-dir", str(DEPLOY), str(file)]
        process = subprocess.Popen(command, env=env, stdout=out, stderr=out, cwd=place)
    served = Replicas(port, process, log)
    try:
        served.wait(lambda: served.http.get("/health").status_code == 200, START_SECONDS)
        served.wait(lambda: len(served.metric("num_requests_running")) == 2, START_SECONDS)
        yield served
    finally:
        served.http.close()
        served.openai.close()
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        process.kill()
        process.wait()
        shutil.rmtree(short, ignore_errors=True)
