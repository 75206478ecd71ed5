"""Tokenizers of every kind on one text: what they store per token, and what they do not know."""

from __future__ import annotations

import itertools

import pytest

import dovetail as dt

WORDS = ("the quick brown fox jumps over the lazy dog", "a dog runs and a fox sleeps", "she sells sea shells by the shore")
TEXT = "\n".join(f"{a}; {b}." for a, b in itertools.product(WORDS, WORDS)) * 4
HELD_OUT = "the lazy fox sells shells; a zebra sleeps."
KINDS = ("byte_pair", "wordpiece", "unigram", "characters", "words")


def measured(kind: str) -> tuple[float, int]:
    """Bytes per token of the held-out text, and its unknown tokens."""
    tokenizer = dt.learn_tokenizer(TEXT, 300, kind)  # type: ignore[arg-type]
    ids = tokenizer.encode(HELD_OUT)
    unknown = [number for number in range(3) if "unknown" in tokenizer.label(number)]
    return len(HELD_OUT.encode()) / len(ids), sum(int((ids == number).sum()) for number in unknown)


def test_larger_tokens_hold_more_bytes() -> None:
    per_token = {kind: measured(kind)[0] for kind in KINDS}
    assert per_token["characters"] == 1.0
    assert 1.0 < per_token["byte_pair"] <= per_token["words"]
    assert per_token["unigram"] > 1.0


@pytest.mark.parametrize("kind", ["byte_pair", "unigram"])
def test_pieces_of_bytes_know_every_text_and_give_it_back(kind: str) -> None:
    tokenizer = dt.learn_tokenizer(TEXT, 300, kind)  # type: ignore[arg-type]
    assert measured(kind)[1] == 0
    assert tokenizer.decode(tokenizer.encode("a zebra — né 日本 🦓")) == "a zebra — né 日本 🦓"


def test_a_word_that_was_never_seen_is_unknown_to_a_tokenizer_of_words_alone() -> None:
    assert measured("words")[1] == 1  # zebra
