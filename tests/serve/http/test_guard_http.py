"""Who may ask, and what a hostile request meets: keys, hosts, origins, sizes, malformed bodies."""

from __future__ import annotations

import http.client
import json
import random
import socket
import time

import pytest
from fastapi.routing import APIRoute
from http_server import KEY, OTHER, Served

from dovetail.base.limits import REQUEST_BYTES
from dovetail.serving.http.options import Options

GOOD = {"prompt": "the cat", "max_tokens": 8, "temperature": 0}


def asked(served: Served, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, bytes]:
    """The status and body of a request with these headers alone, and Host."""
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    host = headers.pop("Host", f"127.0.0.1:{served.port}")
    try:
        connection.putrequest(method, path, skip_host=True)
        for name, value in {"Host": host, **headers, **({"Content-Length": str(len(body))} if body else {})}.items():
            connection.putheader(name, value)
        connection.endheaders(body)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def test_every_route_but_health_needs_a_key(keyed: Served) -> None:
    routes = {(method, route.path) for route in keyed.app.routes for method in getattr(route, "methods", None) or ["GET"]}
    assert {("POST", "/v1/completions"), ("GET", "/metrics"), ("GET", "/openapi.json"), ("GET", "/health")} <= routes
    assert sum(isinstance(route, APIRoute) for route in keyed.app.routes) >= 12
    for method, path in [
        *sorted(routes),
        ("GET", "/no/such/route"),
        ("DELETE", "/v1/models"),
        ("GET", "//health"),
        ("GET", "/docs"),
    ]:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}, {"Authorization": f"Basic {KEY}"}):
            status, body = asked(keyed, method, path.replace("{name:path}", "tiny"), **headers)
            if path == "/health":
                assert status == 200
            else:
                assert status == 401, path
                assert method == "HEAD" or json.loads(body)["error"]["code"] == "invalid_api_key"
    assert asked(keyed, "GET", "/version", Authorization=f"Bearer {KEY}")[0] == 200
    assert asked(keyed, "GET", "/version", Authorization=f"bearer {OTHER}")[0] == 200
    assert asked(keyed, "GET", "/docs", Authorization=f"Bearer {KEY}")[0] == 404


def test_two_keys_share_no_prefixes(keyed: Served) -> None:
    salts = []
    for key in (KEY, KEY, OTHER):
        answer = keyed.http.post(
            "/v1/completions", json={**GOOD, "cache_salt": "s"}, headers={"Authorization": f"Bearer {key}"}
        )
        assert answer.status_code == 200
        salts.append(keyed.engine.requests[-1].salt)
    assert salts[0] == salts[1] != salts[2]
    assert KEY not in salts[0]


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost@evil.example", "", "[::2]", "127.0.0.1:1/x"]
)
def test_a_forged_host_is_refused(served: Served, host: str) -> None:
    assert asked(served, "GET", "/v1/models", Host=host)[0] in (400, 403)


def test_allowed_hosts_and_origins(served: Served, start) -> None:
    assert asked(served, "GET", "/v1/models", Host="LOCALHOST:1")[0] == 200
    other = start(options=Options(models={"tiny": None}, hosts=("api.example",), origins=("https://app.example",)))
    assert asked(other, "GET", "/v1/models", Host="api.example")[0] == 200
    body, kind = json.dumps(GOOD).encode(), {"Content-Type": "application/json"}
    for origin, status in (
        ("https://evil.example", 403),
        ("null", 403),
        ("https://app.example", 200),
        (f"http://127.0.0.1:{other.port}", 200),
    ):
        assert asked(other, "POST", "/v1/completions", body, Origin=origin, **kind)[0] == status
    assert asked(other, "OPTIONS", "/v1/completions", Origin="https://evil.example")[0] == 403
    assert asked(other, "POST", "/v1/completions", body, **{"Content-Type": "text/plain"})[0] == 415


def test_a_body_that_is_too_large_is_refused_while_it_is_read(served: Served) -> None:
    body = b'{"prompt": "' + b"x" * (8 * REQUEST_BYTES) + b'"}'
    status, answer = asked(served, "POST", "/v1/completions", body, **{"Content-Type": "application/json"})
    assert status == 413
    assert json.loads(answer)["error"]["code"] == "body_too_large"
    items = b'{"prompt": [' + b"1," * 900_000 + b"1]}"
    assert asked(served, "POST", "/v1/completions", items, **{"Content-Type": "application/json"})[0] == 413


def test_headers_are_bounded(served: Served) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=10) as sock:
        sock.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n")
        status = b""
        try:
            for _ in range(40):
                sock.sendall(b"X-Long: " + b"x" * 4000 + b"\r\n")
            status = sock.recv(100)
        except ConnectionError:
            pass
        assert b" 200 " not in status
    assert served.http.get("/health").status_code == 200


HOSTILE = {
    "n": {"n": 10**9},
    "max_tokens": {"max_tokens": 2**63},
    "negative": {"max_tokens": -1},
    "logprobs": {"logprobs": 10**6},
    "stops": {"stop": ["x"] * 10**5},
    "an empty stop": {"stop": ""},
    "nan": {"temperature": float("nan")},
    "infinity": {"top_p": float("inf")},
    "a number as a string": {"max_tokens": "5"},
    "a huge seed": {"seed": 10**40},
    "best_of": {"best_of": 3},
    "suffix": {"suffix": "x"},
    "no prompt": {"prompt": None},
    "an empty prompt": {"prompt": ""},
    "an empty list": {"prompt": []},
    "mixed ids": {"prompt": [1, "a"]},
    "ids outside": {"prompt": [10**6]},
    "too long": {"prompt": [5] * 600},
    "too long a string": {"prompt": "word " * 200_000},
    "many prompts": {"prompt": ["x"] * 1000},
    "many choices": {"prompt": ["x"] * 60, "n": 60},
    "biases": {"logit_bias": {str(i): 1.0 for i in range(5000)}},
    "a bias of a word": {"logit_bias": {"word": 1}},
    "a bias outside": {"logit_bias": {"99999": 1}},
    "a surrogate": {"prompt": "\ud800"},
    "a control character": {"model": "\x1b[31mred"},
    "tools": {"tools": [{"type": "function"}]},
    "an unknown format": {"response_format": {"type": "yaml"}},
    "two constraints": {"guided_regex": "(a+)+b", "guided_choice": ["a"]},
    "nothing": {"max_tokens": 0},
}


def test_hostile_fields_are_refused_at_once(served: Served) -> None:
    for name, fields in HOSTILE.items():
        body = json.dumps({**GOOD, **fields}).encode()
        status, answer = asked(served, "POST", "/v1/completions", body, **{"Content-Type": "application/json"})
        assert 400 <= status < 500, (name, status, answer)
        error = json.loads(answer)["error"]
        assert error["message"].isprintable(), name
        assert len(error["message"]) <= 501


def test_200_malformed_requests_among_good_ones(served: Served) -> None:
    """The answers to good requests between them are equal, and the process lives."""
    want, chance = served.complete(**GOOD).json()["choices"], random.Random(0)
    good = json.dumps(GOOD).encode()
    kind, paths = {"Content-Type": "application/json"}, ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]
    for number in range(200):
        bad = (
            lambda: good[: chance.randrange(len(good))],
            lambda: b"[" * 50_000,
            lambda: b'{"a":' * 5_000 + b"1" + b"}" * 5_000,
            lambda: bytes(chance.randrange(256) for _ in range(60)),
            lambda: json.dumps({**GOOD, "prompt": chance.choice([None, {}, [[]], [[1], "a"], True, 1.5, [None]])}).encode(),
            lambda: json.dumps({"messages": chance.choice([None, [], [{}], "x", [{"role": "user"}], [[1]]])}).encode(),
            lambda: json.dumps({"tokens": chance.choice([None, [], ["a"], [-1], [2**70], {}])}).encode(),
            lambda: b"null",
        )[number % 8]()
        path = paths[chance.randrange(4)] if number % 8 not in (4, 5, 6) else paths[(0, 1, 3)[number % 8 - 4]]
        status, _ = asked(served, "POST", path, bad, **kind)
        assert 400 <= status < 500, (path, bad[:80], status)
        if number % 20 == 0:
            assert served.complete(**GOOD).json()["choices"] == want


def test_raw_garbage_on_the_socket_ends_its_connection_alone(served: Served) -> None:
    for data in (
        b"\x00" * 100,
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"\x16\x03\x01\x02",
    ):
        with socket.create_connection(("127.0.0.1", served.port), timeout=5) as sock:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            assert b" 200 " not in sock.recv(1000)
    assert served.http.get("/health").status_code == 200


def test_an_answer_that_reads_no_body_reaches_its_client(served: Served) -> None:
    """The body arrives after the headers: an answer before it, and a close, would reset the connection."""
    for i in range(20):
        body = json.dumps({"input": "x" * 20_000}).encode()
        with socket.create_connection(("127.0.0.1", served.port), timeout=30) as client:
            head = "POST /v1/load_lora_adapter HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode())
            time.sleep(0.02)
            client.sendall(body[: len(body) // 2])
            time.sleep(0.01)
            client.sendall(body[len(body) // 2 :])
            answer = b""
            while chunk := client.recv(65536):
                answer += chunk
        assert answer.startswith(b"HTTP/1.1 403"), (i, answer[:80])
        assert b"adapters_not_offered" in answer
