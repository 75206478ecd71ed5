"""What answers say: no path of the server, the routes that there are, limits with their values, and no contradictions."""

from __future__ import annotations

import pytest
from http_server import Served

from dovetail.base.errors import InputError
from dovetail.serving.http.adapters import _reason
from dovetail.serving.http.errors import as_api_error, without_paths
from dovetail.serving.http.options import Options

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("message", "want"),
    [
        ("/srv/adapters/a: was trained on another base, /srv/models/base", "a: was trained on another base, base"),
        ("holds no 'x' (/srv/m/adapter_config.json)", "holds no 'x' (adapter_config.json)"),
        ("3 does not divide 8 heads / groups; n/a", "3 does not divide 8 heads / groups; n/a"),
        ("layers.0/mixer: 1/2 of a", "layers.0/mixer: 1/2 of a"),
    ],
)
def test_b7_messages_have_no_path(message: str, want: str) -> None:
    assert without_paths(message) == want
    assert "/srv" not in str(as_api_error(InputError(message)))


def test_b7_an_adapters_directory_is_what_the_client_called_it() -> None:
    message = "/srv/adapters/a/adapter.safetensors: was trained on /srv/models/base"
    assert _reason(message, "/srv/adapters/a", "a") == "a/adapter.safetensors: was trained on base"


def test_b7_an_administrator_reads_no_path(start, tmp_path) -> None:
    (tmp_path / "root" / "bad").mkdir(parents=True)
    options = Options(models={"tiny": None}, adapter_root=tmp_path / "root", admin_keys=("admin",))
    server: Served = start(options=options)

    async def fails(name: str, directory: object) -> None:
        raise InputError(f"{directory}/adapter.yaml: does not fit {tmp_path}/base/model.safetensors")

    server.engine.load_adapter = fails  # type: ignore[method-assign]
    for path in ("bad", "../..", "missing"):
        answer = server.http.post(
            "/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": path}, headers={"Authorization": "Bearer admin"}
        )
        assert answer.status_code in (400, 404)
        assert str(tmp_path) not in answer.text
        assert "/tmp" not in answer.text
    assert (
        "bad/adapter.yaml: does not fit model.safetensors"
        in server.http.post(
            "/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": "bad"}, headers={"Authorization": "Bearer admin"}
        ).text
    )


def test_e7_an_unknown_route_names_those_that_there_are(served: Served) -> None:
    answer = served.http.post("/v1/responses", json={"input": "hi"})
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert error["code"] == "route_not_found"
    for path in ("/v1/responses", "/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/embeddings", "/tokenize"):
        assert path in error["message"]


def test_e7_a_prompt_that_is_too_long_has_its_limit(served: Served) -> None:
    for body in ({"prompt": [5] * 600}, {"prompt": "a b " * 400}):
        error = served.complete(**body).json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "511" in error["message"]


def test_e7_n_has_one_limit(served: Served) -> None:
    assert served.complete(prompt="the cat", n=65, max_tokens=1).status_code == 400
    assert served.complete(prompt="the cat", n=64, max_tokens=1).status_code == 200
    assert served.complete(prompt=["a", "b", "c"], n=64, max_tokens=1).status_code == 400


def test_e7_tools_have_one_error_whatever_the_choice(served: Served) -> None:
    messages = set()
    for choice in ("auto", "required", {"type": "function", "function": {"name": "f"}}):
        body = {"messages": [{"role": "user", "content": "hi"}], "tools": [TOOL], "tool_choice": choice}
        answer = served.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400
        messages.add(answer.json()["error"]["message"])
    assert len(messages) == 1
    assert "does not render tools" in messages.pop()
