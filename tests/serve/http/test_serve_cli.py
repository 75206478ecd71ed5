"""`dovetail serve` as a process: it starts, answers, drains on SIGTERM and exits with 0; what cannot be served is refused."""

from __future__ import annotations

import importlib.machinery
import json
import re
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

import dovetail as dt
from dovetail.api.serve import serve
from dovetail.api.serve_vllm import readable
from dovetail.base.errors import DovetailError, FileError, UsageError
from dovetail.cli import main
from dovetail.disk.untrusted import Directory
from dovetail.serving.http.access import read_keys
from dovetail.serving.vllm.process import running, wait_until_ready

KEY = "a-key"


@pytest.fixture(scope="module")
def directory(trained, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, vocabulary = trained
    place = tmp_path_factory.mktemp("served") / "small"
    model.vocabulary = vocabulary
    dt.save(model, place)
    return place


@pytest.fixture
def process(directory: Path, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], httpx2.Client]]:
    (tmp_path / "keys").write_text(f"# of the tests\n{KEY}\n")
    command = [
        sys.executable,
        "-m",
        "dovetail",
        "serve",
        str(directory),
        "--port",
        "0",
        "--api-key-file",
        str(tmp_path / "keys"),
    ]
    with subprocess.Popen([*command, "--drain-seconds", "150", "--threads", "1"], stderr=subprocess.PIPE, text=True) as child:
        assert child.stderr is not None
        line = child.stderr.readline()
        match = re.fullmatch(r"(http://127\.0\.0\.1:\d+)/v1: ready\n", line)
        assert match, line + child.stderr.read()
        with httpx2.Client(base_url=match[1], headers={"Authorization": f"Bearer {KEY}"}, timeout=120) as client:
            yield child, client
        child.kill()


@pytest.mark.slow
def test_it_serves_and_drains_on_sigterm(process: tuple[subprocess.Popen[str], httpx2.Client]) -> None:
    child, client = process
    assert client.get("/v1/models").json()["data"][0]["id"] == "small"
    assert client.get("/version").json() == {"version": dt.__version__}
    assert client.get("/v1/models", headers={"Authorization": "Bearer no"}).status_code == 401
    answers: list[httpx2.Response] = []
    body = {"prompt": "the cat", "max_tokens": 300, "temperature": 0, "ignore_eos": True}
    runs = [threading.Thread(target=lambda: answers.append(client.post("/v1/completions", json=body))) for _ in range(5)]
    for run in runs:
        run.start()
    while 'running{model_name="small"} 5.0' not in client.get("/metrics").text:
        time.sleep(0.02)
    child.send_signal(signal.SIGTERM)
    while client.get("/health").status_code != 503:
        time.sleep(0.01)
    assert client.post("/v1/completions", json=body).status_code == 503
    for run in runs:
        run.join()
    assert [answer.status_code for answer in answers] == [200] * 5
    assert len({answer.json()["choices"][0]["text"] for answer in answers}) == 1
    assert child.wait(60) == 0


def test_an_address_for_others_needs_a_key(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", str(directory), "--host", "0.0.0.0"])
    assert ended.value.code == 2
    assert "--api-key" in capsys.readouterr().err


def test_what_cannot_be_served_is_an_error(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="no HTTP header"):
        serve(directory, api_key=["two words"])
    (tmp_path / "empty").write_text("# no key\n")
    for path in ("empty", "missing"):
        with pytest.raises(FileError, match=path):
            read_keys(tmp_path / path)
    with pytest.raises(FileError, match="cannot be bound"):
        serve(directory, host="192.0.2.1", api_key=[KEY])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"dovetail-lm\[serve\]"):
        serve(directory)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--engine", "vllm"], r'is not installed in this environment: pip install "dovetail-lm\[vllm\]"'),
        (["--engine", "vllm", "--drafts", "3"], "--drafts: is a flag of --engine native"),
        (["--tensor", "2"], "--tensor: is a flag of --engine vllm"),
        (["--vllm-flag=--seed=1"], "--vllm-flag: is a flag of --engine vllm"),
    ],
)
def test_flags_of_the_other_engine(directory: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["serve", str(directory), *flags])
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"port": 0}, "vLLM does not say which port is free"),
        ({"host": "0.0.0.0"}, "give api_key"),
        ({"api_key": ("a", "b")}, "takes one key"),
    ],
)
def test_what_vllm_is_not_asked_for(
    directory: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, object], message: str
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", types.ModuleType("vllm"))
    sys.modules["vllm"].__spec__ = importlib.machinery.ModuleSpec("vllm", None)
    with pytest.raises(UsageError, match=message):
        dt.serve_vllm(directory, **given)  # type: ignore[arg-type]


def test_a_process_that_fails_is_an_error_and_one_that_a_signal_ends_is_not() -> None:
    with pytest.raises(DovetailError, match="exit code 3"), running([sys.executable, "-c", "raise SystemExit(3)"], {}) as child:
        assert not wait_until_ready(child, "127.0.0.1", 9)
    with running([sys.executable, "-c", "import time; time.sleep(60)"], {}) as child:
        signal.raise_signal(signal.SIGTERM)
        assert child.wait(30) == -signal.SIGTERM


def test_an_own_directory_is_exported_for_vllm_and_one_of_hugging_face_taken_as_it_is(directory: Path, tmp_path: Path) -> None:
    made, flags = readable(Directory(directory), tmp_path / "made", 1)
    assert (made / "config.json").is_file()
    assert flags == []
    assert readable(Directory(made), tmp_path / "other", 1) == (made, [])
    mixed, mixer = tmp_path / "mixed", "{heads: 2, head: 32, position: alibi}"
    dt.save(dt.build(f"{{width: 24, vocab: 62, layers: [{{mixer: {mixer}, ffn: {{hidden: 44}}}}]}}"), mixed)
    made, flags = readable(Directory(mixed), tmp_path / "own", 1)
    assert json.loads((made / "config.json").read_text())["model_type"] == "dovetail"
    assert flags == ["--enforce-eager"]
