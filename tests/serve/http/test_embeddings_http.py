"""Embeddings and relevance by `dovetail serve`, real processes: of a model that generates, and of encoders with heads."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from http_server import TEMPLATE
from real_server import Real, real_server, write_directory

import dovetail as dt
from dovetail.decoding.generation import Vocabulary

TEXTS = ["the cat 🙂", "sat", "on the mat, über allen Gipfeln", "all is well"]
ENCODER = "{width: 32, vocab: 300, layers: [{mixer: {heads: 2, head: 16, mask: full}, ffn: {hidden: 64}}], head: HEAD}"


@pytest.fixture(scope="module")
def causal(trained, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_directory(*trained, tmp_path_factory.mktemp("embedded") / "causal", TEMPLATE)


@pytest.fixture(scope="module")
def real(causal: Path) -> Iterator[Real]:
    with real_server(causal) as one:
        yield one


def encoder(trained, place: Path, head: str) -> Path:
    tokenizer = trained[1].tokenizer
    model = dt.build(dt.from_yaml(ENCODER.replace("HEAD", head)).set("vocab", tokenizer.size), seed=4)
    return write_directory(model.eval(), Vocabulary(tokenizer=tokenizer), place, TEMPLATE)


def test_embeddings_are_those_of_a_forward_pass_in_any_batch_and_form(real: Real, causal: Path) -> None:
    want = dt.embed(causal, TEXTS)
    whole = real.openai.embeddings.create(model=real.model, input=TEXTS)  # the client asks for base64
    assert np.abs(np.array([one.embedding for one in whole.data]) - want.numpy()).max() <= 1e-6
    assert [one.index for one in whole.data] == [0, 1, 2, 3]
    raw = real.http.post("/v1/embeddings", json={"input": TEXTS, "encoding_format": "base64"}).json()
    floats = real.http.post("/v1/embeddings", json={"input": TEXTS}).json()
    for a, b, c in zip(raw["data"], floats["data"], whole.data, strict=True):
        assert np.frombuffer(base64.b64decode(a["embedding"]), "<f4").tolist() == b["embedding"]
        assert b["embedding"] == pytest.approx(c.embedding, abs=1e-7)
    tokens = [real.http.post("/tokenize", json={"prompt": one}).json()["tokens"] for one in TEXTS]
    assert floats["usage"]["prompt_tokens"] == sum(map(len, tokens))
    for given in (TEXTS[0], [TEXTS[0]], tokens[0], [tokens[0]]):
        alone = real.http.post("/v1/embeddings", json={"input": given}).json()["data"]
        assert [one["embedding"] for one in alone] == [floats["data"][0]["embedding"]]  # no bit depends on the batch
    short = real.http.post("/v1/embeddings", json={"input": TEXTS[0], "dimensions": 8}).json()["data"][0]["embedding"]
    assert short == pytest.approx(dt.embed(causal, TEXTS[:1], dimensions=8)[0].tolist(), abs=1e-6)


def test_embeddings_beside_generation_change_nothing(real: Real) -> None:
    fields = {"prompt": "the cat", "max_tokens": 60, "ignore_eos": True}
    want, found = real.complete(**fields).json()["choices"], []
    asking = threading.Thread(target=lambda: found.append(real.complete(**fields).json()["choices"]))
    asking.start()
    vectors = [real.http.post("/v1/embeddings", json={"input": TEXTS}).json()["data"] for _ in range(3)]
    asking.join()
    assert found == [want]
    assert vectors[0] == vectors[1] == vectors[2]


def test_documents_by_the_cosine(real: Real, causal: Path) -> None:
    want = dt.rerank(causal, "the cat", TEXTS)
    for path in ("/v1/rerank", "/rerank"):
        body = {"query": "the cat", "documents": [TEXTS[0], {"text": TEXTS[1]}, *TEXTS[2:]], "top_n": 3}
        results = real.http.post(path, json={**body, "return_documents": True}).json()["results"]
        assert [one["index"] for one in results] == [one.index for one in want[:3]]
        assert [one["relevance_score"] for one in results] == pytest.approx([one.score for one in want[:3]], abs=1e-6)
        assert [one["document"]["text"] for one in results] == [TEXTS[one.index] for one in want[:3]]
    scored = real.http.post("/score", json={"text_1": "the cat", "text_2": TEXTS}).json()["data"]
    by_index = {one.index: one.score for one in want}
    assert [one["score"] for one in scored] == pytest.approx([by_index[i] for i in range(4)], abs=1e-6)


@pytest.mark.slow
def test_encoders_are_served_with_their_heads(trained, tmp_path: Path) -> None:
    place = encoder(trained, tmp_path / "pooled", "{kind: pooled_embedding, dense: true}")
    with real_server(place) as one, real_server(place, "--pooling=cls") as chosen:
        for server, pooling in ((one, None), (chosen, "cls")):
            found = server.http.post("/v1/embeddings", json={"input": TEXTS}).json()["data"]
            want = dt.embed(place, TEXTS, pooling=pooling)
            assert (torch.tensor([vector["embedding"] for vector in found]) - want).abs().max() <= 1e-6
        refused = one.complete(prompt="the cat")
        assert refused.status_code == 400
        assert "does not generate" in refused.json()["error"]["message"]
    place = encoder(trained, tmp_path / "ranks", "{kind: classifier, classes: 1}")
    with real_server(place) as one:
        results = one.http.post("/v1/rerank", json={"query": "the cat", "documents": TEXTS}).json()["results"]
        want = dt.rerank(place, "the cat", TEXTS)
        assert [one["index"] for one in results] == [one.index for one in want]
        assert [one["relevance_score"] for one in results] == pytest.approx([one.score for one in want], abs=1e-6)


REFUSED = {
    "/v1/embeddings": [
        {"input": []},
        {"input": ""},
        {"input": ["x"] * 1000},
        {"input": [10**6]},
        {"input": [[]]},
        {"input": [1, "a"]},
        {"input": "x", "dimensions": 0},
        {"input": "x", "dimensions": 10**6},
        {"input": "x", "encoding_format": "int8"},
        {"input": [5] * 5000},
        {"input": "word " * 200_000},
    ],
    "/v1/rerank": [{"query": "x"}, {"query": "x", "documents": []}, {"query": "x", "documents": ["x"] * 1000}],
    "/score": [{"text_1": ["a", "b"], "text_2": ["a"]}, {"text_1": "a"}],
}


@pytest.mark.parametrize("path", REFUSED)
def test_hostile_inputs_are_refused(real: Real, path: str) -> None:
    for body in REFUSED[path]:
        answer = real.http.post(path, json=body)
        assert answer.status_code == 400, (str(body)[:80], answer.text[:200])
