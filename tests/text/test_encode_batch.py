"""Texts encoded together have the ids of each alone, and need no torch."""

from __future__ import annotations

import random
import subprocess
import sys

from dovetail.text import tokenizer
from dovetail.text.learn import learn


def test_a_batch_has_the_ids_of_each_text(monkeypatch) -> None:
    monkeypatch.setattr(tokenizer, "PIECE", 40)
    texts = ["", "a", "one two three", "naïve " * 30, "x" * 90, "<|end|> is plain text", "four five"]
    found = learn("one two three four five naïve " * 9, 300)
    assert [ids.tolist() for ids in found.encode_batch(texts)] == [found.encode(text).tolist() for text in texts]
    assert found.decode(found.encode(texts[3])) == texts[3]
    assert found.decode(tuple(found.encode("one two").tolist())) == "one two"


def test_texts_of_every_length_around_a_piece_keep_their_places(monkeypatch) -> None:
    monkeypatch.setattr(tokenizer, "PIECE", 40)
    found, draw = learn("one two three four five naïve " * 9, 300), random.Random(0)
    texts = [("one two naïve " * 9)[:length] for length in range(85)]
    for _ in range(5):
        draw.shuffle(texts)
        assert [ids.tolist() for ids in found.encode_batch(texts)] == [found.encode(text).tolist() for text in texts]


def test_a_worker_of_a_build_imports_no_torch() -> None:
    code = "import sys, dovetail.data.build, dovetail.data.executors; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
