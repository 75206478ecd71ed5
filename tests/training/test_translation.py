"""A made language, translated with attention and without: exact at trained lengths, and the gap at twice the length.

A word is a consonant; a sentence has no word twice. Its translation has the words in reverse, each inflected by a vowel that
depends on the word, and an ending: `bdk` becomes `kadobon`. The decoder with attention sees the last four letters and attends
to the source (Bahdanau et al. 2014), so that each step depends on what is near it; the one without starts from the encoder's
last state (Cho et al. 2014), which has one size for every length.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import dovetail as dt
from dovetail.files.spec import from_yaml

WORDS = "bcdfghjklmnpqrstvwxz"
LONGEST, TESTED = 8, 100
SPEC = """
width: 64
vocab: 30
encoder:
  width: 64
  vocab: 30
  layers: [{kind: hybrid_block, mixer: gru, ssm: {kind: reverse, mixer: gru}, ffn: {hidden: 128}}]
  head: null
layers: [DECODER]
"""
DECODERS = {
    "attention": "{mixer: {kind: attention, heads: 4, mask: [causal, {kind: window, size: 4}]}, cross: additive_attention, "
    "ffn: {hidden: 128}}",
    "last state": "{mixer: {kind: gru, from_encoder: true}, ffn: {hidden: 128}}",
}
LETTERS = 4 * LONGEST + 6  # a translation of twice the length has fewer
SETTINGS: dict[str, Any] = {"batch": 64, "length": LETTERS, "learning_rate": 0.003, "tokenizer": "characters", "steps": 2500}


def sentence(rng: random.Random, words: int) -> str:
    return "".join(rng.sample(WORDS, words))


def translated(source: str) -> str:
    return "".join(word + "oa"[WORDS.index(word) % 2] for word in reversed(source)) + "n"


def test_the_language_is_reversed_and_inflected() -> None:
    assert (translated("bdk"), translated("bck")) == ("kadobon", "kacabon")


def exact(model: dt.Transformer, rng: random.Random, lengths: range) -> float:
    """The share of fresh sentences whose translation is right to the letter."""
    tested = [sentence(rng, rng.choice(lengths)) for _ in range(TESTED)]
    found = [model.generate(source, max_tokens=LETTERS, temperature=0) for source in tested]
    return sum(translation == translated(source) for source, translation in zip(tested, found, strict=True)) / TESTED


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(3))
def test_attention_translates_sentences_of_twice_the_length(seed: int, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    rng = random.Random(seed)
    rows = [sentence(rng, rng.randint(2, LONGEST)) for _ in range(12_000)]
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(json.dumps({"source": row, "target": translated(row)}) + "\n" for row in rows))
    found: dict[str, tuple[float, float]] = {}
    for name, decoder in DECODERS.items():
        spec, out = from_yaml(SPEC.replace("DECODER", decoder)), tmp_path / name.replace(" ", "-")
        dt.train(spec, pairs=pairs, out=out, evals=1, sample=0, quiet=True, seed=seed, **SETTINGS)
        model = dt.load(out)
        found[name] = exact(model, rng, range(2, LONGEST + 1)), exact(model, rng, range(2 * LONGEST, 2 * LONGEST + 1))
    assert found["attention"][0] >= 0.95, found
    assert found["attention"][1] - found["last state"][1] >= 0.3, found
