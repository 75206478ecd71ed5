"""Adapters of `dovetail serve`: named at the start, loaded and unloaded by an administrator, and by nobody else."""

from __future__ import annotations

import copy
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
import torch

import dovetail as dt
from dovetail.api.serve import serve
from dovetail.base.errors import UsageError
from dovetail.cli import main
from dovetail.weights.adapters.storage import adapter_tensors

ADMIN = {"Authorization": "Bearer of-the-admin"}
BODY = {"prompt": "the cat", "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def place(trained, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """base, adapters/one (ours), adapters/two (peft's layout), adapters/other (of another base), and a link out of it."""
    model, vocabulary = trained
    root = tmp_path_factory.mktemp("adapters")
    base = copy.deepcopy(model)
    base.vocabulary = vocabulary
    dt.save(base, root / "base")
    for i, (name, layout) in enumerate((("one", "dovetail"), ("two", "peft"), ("other", "dovetail"))):
        adapted = copy.deepcopy(model)
        if name == "other":
            with torch.no_grad():
                adapted.get_parameter("layers.0.mixer.q.weight").add_(1)
        dt.attach(adapted, {"kind": "lora", "rank": 2 + i})
        with torch.no_grad():
            for tensor in adapter_tensors(adapted).values():
                tensor.add_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(i)), alpha=0.3)
        dt.save_adapter(adapted, root / "adapters" / name, base=root / "base", layout=layout)  # type: ignore[arg-type]
    (root / "adapters" / "link").symlink_to(root / "base")
    (root / "admin").write_text("of-the-admin\n")
    return root


@pytest.fixture(scope="module")
def client(place: Path) -> Iterator[httpx2.Client]:
    flags = [f"--adapter=one={place}/adapters/one", f"--adapter-root={place}/adapters", f"--admin-key-file={place}/admin"]
    command = [sys.executable, "-m", "dovetail", "serve", f"{place}/base", "--port=0", "--threads=1", "--json", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        url = json.loads(child.stdout.readline())["url"].removesuffix("/v1")
        with httpx2.Client(base_url=url, timeout=120) as client:
            yield client
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) == 0


def text(client: httpx2.Client, model: str) -> str:
    answer = client.post("/v1/completions", json={**BODY, "model": model})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def wanted(place: Path, adapter: str | None) -> str:
    model = dt.load(place / "base", adapter=None if adapter is None else place / "adapters" / adapter)
    return dt.generate(model, "the cat", max_tokens=12).text


def load(client: httpx2.Client, name: str, path: str, **how) -> httpx2.Response:
    return client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path}, **{"headers": ADMIN, **how})


def unload(client: httpx2.Client, name: str) -> httpx2.Response:
    return client.post("/v1/unload_lora_adapter", json={"lora_name": name}, headers=ADMIN)


def test_adapters_are_models_by_their_names(client: httpx2.Client, place: Path) -> None:
    assert [(card["id"], card["parent"]) for card in client.get("/v1/models").json()["data"]] == [
        ("base", None),
        ("one", "base"),
    ]
    texts = {name: text(client, name) for name in ("base", "one")}
    assert load(client, "second", "two").json() == {"status": "ok", "message": "second: loaded"}
    texts["second"] = text(client, "second")
    assert len(set(texts.values())) == 3
    assert unload(client, "second").status_code == 200
    refused = client.post("/v1/completions", json={**BODY, "model": "second"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
    # the name again, with another adapter: no cached prefix of the first is used
    assert load(client, "second", "one").status_code == 200
    assert text(client, "second") == texts["one"]
    assert unload(client, "second").status_code == 200
    assert text(client, "base") == texts["base"]
    for name, adapter in (("base", None), ("one", "one")):
        assert texts[name] == wanted(place, adapter)


def test_what_may_not_be_loaded(client: httpx2.Client, place: Path) -> None:
    def error(answer: httpx2.Response) -> tuple[int, str]:
        return answer.status_code, answer.json()["error"]["message"]

    assert load(client, "x", "two", headers={}).status_code == 403
    assert load(client, "x", "two", headers={"Authorization": "Bearer guessed"}).status_code == 403
    for path in ("../base", "link", "/etc", str(place / "base"), ".", "none", "a\0b", "a" * 1000):
        status, message = error(load(client, "x", path))
        assert status == 404, path
        assert str(place) not in message
    assert load(client, "../x", "two").status_code == 400
    assert error(load(client, "one", "two")) == (400, "lora_name: 'one' is served already; unload it first")
    status, message = error(load(client, "x", "other"))
    assert status == 400
    assert message.startswith("other: was trained on another base")
    assert unload(client, "base").status_code == 404
    assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["base", "one"]


def test_flags_that_do_not_fit_are_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="needs --admin-key-file"):
        serve(place / "base", adapter_root=place / "adapters")
    with pytest.raises(UsageError, match="is no name"):
        serve(place / "base", adapter={"a b": place / "adapters" / "one"})
    with pytest.raises(SystemExit) as ended:
        main(["serve", str(place / "base"), "--adapter", "one"])
    assert ended.value.code == 2
    assert "is not NAME=DIR" in capsys.readouterr().err
