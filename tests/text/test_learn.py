"""Five kinds of tokenizers: trained, saved and loaded."""

import json
import subprocess
import sys

import pytest
from hypothesis import given, settings, strategies as st

from dovetail.base.errors import SpecError
from dovetail.text.learn import KINDS, LEAST, UNKNOWN, learn
from dovetail.text.tokenizer import END, MASK, TOKENIZER_FILE, Tokenizer

TEXT = "the cat sat on the mat,  the other cat sat on the hat.\nÜber allen Gipfeln ist Ruh'!\n" * 20
MADE = {kind: learn(TEXT, 300, kind) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_saved_and_loaded(kind, tmp_path):
    made = MADE[kind]
    (tmp_path / TOKENIZER_FILE).write_text(made.to_json(), encoding="utf-8")
    again = Tokenizer.load(tmp_path)
    assert again.to_json() == made.to_json()
    assert again.encode(TEXT).tolist() == made.encode(TEXT).tolist()
    assert (made.id_of(END), made.id_of(MASK)) == (0, 1)
    assert made.size <= 300
    assert 3 < int(made.encode(TEXT).max()) < made.size


def test_scores_of_pieces_are_those_that_a_file_keeps():
    scores = [score for _, score in json.loads(MADE["unigram"].to_json())["model"]["vocab"]]
    assert scores == [round(score, 9) for score in scores]
    assert len(set(scores)) > 10


@pytest.mark.parametrize("kind", ["byte_pair", "unigram", "characters", "words"])
def test_the_text_comes_back(kind):
    assert MADE[kind].decode(MADE[kind].encode(TEXT)) == TEXT


@pytest.mark.parametrize("kind", ["byte_pair", "unigram"])
@given(text=st.text(max_size=60))
@settings(max_examples=100, deadline=None)
def test_byte_tokenizers_encode_every_text(kind, text):
    assert MADE[kind].decode(MADE[kind].encode(text)) == text


def test_wordpiece_keeps_words_and_loses_gaps():
    made = MADE["wordpiece"]
    assert made.decode(made.encode("the  other\ncat,sat")) == "the other cat , sat"
    assert any(made.label(i).startswith("##") for i in range(made.size))


def test_a_text_gives_one_tokenizer_in_every_process():
    """The trainer of WordPiece numbers continuations in the order of a hash table, and equal counts are merged by number."""
    code = f"from dovetail.text.learn import *; print([learn({TEXT!r}, 60, kind).to_json() for kind in ('wordpiece', 'words')])"
    runs = {subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout for _ in range(3)}
    assert len(runs) == 1
    made = learn(TEXT, 60, "wordpiece")
    assert made.size == 60
    assert [token["content"] for token in json.loads(made.to_json())["added_tokens"]] == [END, MASK, UNKNOWN]


def test_unknown_words_become_the_unknown_token():
    for kind in ("wordpiece", "characters", "words"):
        made = MADE[kind]
        assert made.id_of(UNKNOWN) == 2
        assert made.encode("Ω").tolist() == [2]
    assert MADE["characters"].encode("the").tolist() != [2, 2, 2]
    assert len(MADE["words"].encode("the cat")) == 3


def test_impossible_settings_are_refused():
    with pytest.raises(SpecError, match=f"vocab: 257 is too small: .* {LEAST}"):
        learn(TEXT, 257)
    with pytest.raises(SpecError, match="kinds: byte_pair, wordpiece"):
        learn(TEXT, 300, "sentencepiece")
    with pytest.raises(SpecError, match="too small for any"):
        learn(TEXT, 2, "words")
