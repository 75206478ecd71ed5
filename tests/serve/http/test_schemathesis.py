"""schemathesis (extra `fuzz`) over the OpenAPI schema of `dovetail serve`, a real process: no answer is a server error."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from http_server import TEMPLATE
from real_server import Real, real_server, write_directory

COMMAND = shutil.which("schemathesis")  # as a command: its pytest plugin need not be loaded


@pytest.fixture(scope="module")
def real(trained, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    place = write_directory(*trained, tmp_path_factory.mktemp("fuzzed") / "small", TEMPLATE)
    with real_server(place, "--longest=64") as one:
        yield one


def test_the_schema_describes_every_route_and_every_reference_resolves(real: Real) -> None:
    schema = real.http.get("/openapi.json").json()
    names = set(schema["components"]["schemas"])
    text = real.http.get("/openapi.json").text
    used = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert used <= names, used - names
    assert {"/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/rerank", "/score", "/tokenize"} <= set(
        schema["paths"]
    )


@pytest.mark.slow
@pytest.mark.skipif(COMMAND is None, reason="schemathesis is not installed")
@pytest.mark.timeout(1800)
def test_no_generated_request_is_a_server_error(real: Real, tmp_path: Path) -> None:
    assert COMMAND is not None
    checks = ["--checks=not_a_server_error,response_schema_conformance", "--max-examples=40", "--seed=1", "--no-color"]
    limits = ["--request-timeout=120", "--suppress-health-check=all", "--phases=examples,coverage,fuzzing"]
    command = [COMMAND, "run", f"{real.url}/openapi.json", *checks, *limits]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)  # it writes a cache
    assert done.returncode == 0, done.stdout[-4000:]
    counts = re.search(r"(\d+) generated, (\d+) passed", done.stdout)
    assert counts, done.stdout[-2000:]
    assert int(counts[1]) == int(counts[2]) > 500
    assert real.http.get("/health").status_code == 200
    assert real.complete(prompt="the cat").status_code == 200
