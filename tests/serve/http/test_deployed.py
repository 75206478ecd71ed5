"""What the files of deploy/ and the docs say of a server is true of a real one: its flags, and the names of its metrics."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest
import yaml
from http_server import TEMPLATE
from real_server import write_directory

from dovetail.cli.command import command_of
from dovetail.serving.http.options import Options

ROOT = Path(__file__).parents[3]
KUBERNETES, RAY = ROOT / "deploy/kubernetes", ROOT / "deploy/ray/serve.yaml"
NAME = re.compile(r"\b(?:dovetail|vllm):([a-z_]+)\b")
SUFFIXES = ("_total", "_bucket", "_sum", "_count", "_created")


def printed(page: str) -> set[str]:
    """The names of a page of metrics, without their prefix: those of families and of samples."""
    names = set(re.findall(r"^# TYPE \w+:(\w+) ", page, re.M)) | set(re.findall(r"^\w+:(\w+)\{", page, re.M))
    return names | {name.removesuffix(end) for name in names for end in SUFFIXES if name.endswith(end)}


def mentioned() -> dict[str, set[str]]:
    """The metrics that each file names; adapter rules name them by a regular expression."""
    files = [*(ROOT / "deploy").rglob("*.yaml"), ROOT / "docs/scale.md", ROOT / "docs/serve.md"]
    found = {str(file.relative_to(ROOT)): set(NAME.findall(file.read_text())) for file in files}
    (autoscale,) = (
        one for one in yaml.safe_load_all((KUBERNETES / "autoscale.yaml").read_text()) if one["kind"] == "ConfigMap"
    )
    (begin, choices) = re.findall(r"vllm:(\w+)\((.*?)\)", autoscale["data"]["rules.yaml"])[0]
    found["deploy/kubernetes/autoscale.yaml"] = {begin + one for one in choices.split("|")}
    section = re.search(r"^## Metrics\n(.*?)^## ", (ROOT / "docs/serve.md").read_text(), re.M | re.S)
    assert section is not None
    found["docs/serve.md"] |= set(re.findall(r"`([a-z]\w*_\w+)`", section[1]))
    return found


def test_every_metric_that_files_and_docs_name_is_printed(start) -> None:
    served = start(options=Options(models={"tiny": None}, metrics_prefix="vllm"))
    served.complete(prompt="the cat")
    names, said = printed(served.http.get("/metrics").text), mentioned()
    assert said["deploy/kubernetes/autoscale.yaml"] == {"num_requests_running", "num_requests_waiting"}
    assert {"kv_cache_usage_perc", "request_queue_time_seconds"} <= said["docs/serve.md"]
    assert len(said["docs/scale.md"]) >= 4
    assert {file: of - names for file, of in said.items() if of - names} == {}


def manifest() -> list[str]:
    documents = yaml.safe_load_all((KUBERNETES / "serve.yaml").read_text())
    (deployment,) = (one for one in documents if one["kind"] == "Deployment")
    return deployment["spec"]["template"]["spec"]["containers"][0]["command"]


@pytest.mark.slow
def test_the_command_of_the_manifest_runs(trained, tmp_path: Path) -> None:
    """With the paths, the address and the port of this machine; everything else as Kubernetes would start it."""
    directory = write_directory(*trained, tmp_path / "model", TEMPLATE)
    (tmp_path / "keys").write_text("a-key\n")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    here = {
        "/models/small": str(directory),
        "--host=0.0.0.0": "--host=127.0.0.1",
        "--port=8000": f"--port={port}",
        "--api-key-file=/etc/dovetail/keys": f"--api-key-file={tmp_path / 'keys'}",
        "--allow-host=$(POD_IP)": "--allow-host=192.0.2.7",
        "--threads=4": "--threads=1",
    }
    given = manifest()
    assert set(here) < set(given)
    command = [sys.executable, "-m", *(here.get(word, word) for word in given), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            assert client.get("/health", headers={"Host": "10.0.0.3:8000"}).status_code == 200, "as the kubelet asks"
            headers = {"Host": "192.0.2.7:8000", "Authorization": "Bearer a-key"}
            assert "vllm:num_requests_waiting" in client.get("/metrics", headers=headers).text, "as Prometheus asks"
            assert client.get("/metrics", headers={**headers, "Host": "10.0.0.9"}).status_code == 403
            assert client.get("/v1/models", headers={"Host": "dovetail-serve"}).status_code == 401
            models = client.get("/v1/models", headers={**headers, "Host": "dovetail-serve"}).json()
            assert [one["id"] for one in models["data"]] == ["small"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_arguments_of_the_ray_application_are_options_of_the_command() -> None:
    (app,) = yaml.safe_load(RAY.read_text())["applications"]
    fields = set(command_of("serve").options)
    assert set(app["args"]) <= fields
    engine = next(one for one in app["deployments"] if one["name"] == "Engine")
    assert engine["max_ongoing_requests"] == app["args"]["rows"] + app["args"]["queued"]


@pytest.mark.parametrize("file", [*KUBERNETES.glob("*.yaml"), RAY], ids=lambda file: file.name)
def test_files_that_manifests_name_exist(file: Path) -> None:
    text = file.read_text()
    for name in re.findall(r"deploy/[\w/.-]+\w", text):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"\b(\w+\.yaml)\b", text):
        assert name in ("run.yaml", "scrape.yaml", "rules.yaml") or list((ROOT / "deploy").rglob(name)), name
