"""Embeddings and scores: those of a direct forward pass, whatever else is embedded beside."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import dovetail as dt
from dovetail.base.errors import InputError, SpecError
from dovetail.decoding.embedding import Embedder
from dovetail.decoding.generation import Vocabulary
from dovetail.proof.laws.case import perturbed
from dovetail.text.learn import learn

TEXTS = [[5, 7, 11], [3], list(range(2, 40)), [9, 9]]


def hidden(model, ids: list[int]) -> torch.Tensor:
    """Hidden states (n, width) of a batch in which the text is padded on the right beside a longer one."""
    longest = max(map(len, TEXTS)) + 3
    batch = torch.zeros(2, longest, dtype=torch.long)
    batch[0, : len(ids)], batch[1] = torch.tensor(ids), 4
    with torch.inference_mode():
        x, _ = model.hidden(batch, dt.Ctx(layout=dt.TokenLayout.padded([len(ids), longest], longest)))
    return x[0, : len(ids)]


@pytest.mark.parametrize(
    ("name", "pooling", "pooled"),
    [
        ("llama-tiny", None, lambda x: x[-1]),
        ("llama-tiny", "mean", lambda x: x.mean(0)),
        ("llama-tiny", "cls", lambda x: x[0]),
        ("mamba2-hybrid-tiny", None, lambda x: x[-1]),
        ("bert-tiny", "mean", lambda x: x.mean(0)),
        ("bert-tiny", "cls", lambda x: x[0]),
    ],
)
def test_an_embedding_is_the_pooled_hidden_state_of_a_padded_batch(name: str, pooling, pooled) -> None:
    model = perturbed(dt.load_spec(name), 0).eval()  # float64
    vectors = dt.embed(model, TEXTS, pooling=pooling)
    for ids, vector in zip(TEXTS, vectors, strict=True):
        want = F.normalize(pooled(hidden(model, ids)).double(), dim=-1)
        assert (vector.double() - want).abs().max() <= 1e-6
        assert torch.equal(dt.embed(model, [ids], pooling=pooling)[0], vector)  # no bit depends on the others


def test_the_head_of_a_spec_embeds() -> None:
    model = perturbed(dt.load_spec("bert-tiny"), 0).eval()
    ids = TEXTS[2]
    with torch.inference_mode():
        want = F.normalize(model(torch.tensor([ids]))[0].double(), dim=-1)
    assert (dt.embed(model, [ids])[0].double() - want).abs().max() <= 1e-6
    assert (dt.embed(model, [ids], pooling="cls")[0].double() - want).abs().max() > 1e-2  # not behind the dense layer


def test_dimensions_keep_the_first_numbers() -> None:
    model = perturbed(dt.load_spec("llama-tiny"), 0).eval()
    whole, short = dt.embed(model, TEXTS), dt.embed(model, TEXTS, dimensions=8)
    assert (short - F.normalize(whole[:, :8], dim=-1)).abs().max() <= 1e-6
    with pytest.raises(SpecError, match="dimensions"):
        dt.embed(model, TEXTS, dimensions=10**6)


HEADS = {
    "classifier": "{kind: classifier, classes: 1}",
    "reward": "{kind: reward}",
    "cosine": "{kind: pooled_embedding}",
}


@pytest.mark.parametrize("name", HEADS)
def test_documents_are_ranked_by_the_head_or_by_the_cosine(name: str) -> None:
    tokenizer = learn("a plain text of words without a sign " * 20, 300)
    layers = "layers: [{mixer: {heads: 2, head: 16, mask: full}, ffn: {hidden: 64}}]"
    model = dt.build(dt.from_yaml(f"{{width: 32, vocab: {tokenizer.size}, head: {HEADS[name]}, {layers}}}"), seed=3).eval()
    model.vocabulary = Vocabulary(tokenizer=tokenizer)
    documents = ["plain", "a text of words", "sign", "without"]
    ranked = dt.rerank(model, "a text", documents)
    assert sorted(one.index for one in ranked) == [0, 1, 2, 3]
    assert [one.score for one in ranked] == sorted((one.score for one in ranked), reverse=True)
    assert dt.rerank(model, "a text", documents, top_n=2) == ranked[:2]
    for one in ranked:
        if name == "cosine":
            a, b = dt.embed(model, ["a text", documents[one.index]])
            want = float(a @ b)
        else:
            ids, _ = tokenizer.pair("a text", documents[one.index])
            with torch.inference_mode():
                want = float(torch.sigmoid(model(torch.tensor([ids]))[0, 0]))
        assert one.score == pytest.approx(want, abs=1e-6)
    assert len({one.score for one in ranked}) == 4


def test_what_cannot_be_embedded_is_refused() -> None:
    with pytest.raises(SpecError, match="reads no tokens"):
        Embedder(dt.build("vit-tiny"))
    model = dt.build("bert-tiny").eval()
    for ids, problem in (([], "no token"), ([10**6], "outside"), ([1] * 65, "at most 64")):
        with pytest.raises(InputError, match=problem):
            dt.embed(model, [ids])
    with pytest.raises(InputError, match="tokenizer"):
        dt.embed(model, ["text"])
