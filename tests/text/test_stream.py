"""Streamed text: the pieces join to the whole, and no character is split."""

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer as Engine, decoders, models, pre_tokenizers

from dovetail.text.learn import KINDS, learn
from dovetail.text.stream import HALF, TextStream
from dovetail.text.tokenizer import Tokenizer

TEXT = "the cat sat on the mat,  the other cat sat on the hat.\nÜber allen Gipfeln ist Ruh'! 日本語 🙂\n" * 20


def sentencepiece() -> Tokenizer:
    """Words with ▁ before them, and bytes for what is not known, as Llama 2 and its like have."""
    pieces = [
        ("<unk>", 0.0),
        *((f"<0x{i:02X}>", -9.0) for i in range(256)),
        ("▁the", -1.0),
        ("▁", -2.0),
        ("cat", -2.0),
        ("s", -3.0),
    ]
    engine = Engine(models.Unigram(pieces, 0, byte_fallback=True))
    engine.pre_tokenizer = pre_tokenizers.Metaspace()
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    engine.decoder = decoders.Sequence(parts)
    return Tokenizer(engine)


MADE = {**{kind: learn(TEXT, 300, kind) for kind in KINDS}, "sentencepiece": sentencepiece()}


def streamed(tokenizer, ids, prompt=()):
    stream = TextStream(tokenizer, prompt)
    pieces = [stream.push(token) for token in ids]
    return pieces, stream.end()


@pytest.mark.parametrize("kind", MADE)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_joined_pieces_are_the_text(kind, data):
    tokenizer = MADE[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.size - 1), max_size=25))
    cut = data.draw(st.integers(0, len(ids)))
    whole, before = tokenizer.decode(ids), tokenizer.decode(ids[:cut])
    pieces, rest = streamed(tokenizer, ids[cut:], ids[:cut])
    changes = kind == "sentencepiece" and HALF in whole  # there a bad byte spoils the good ones that were before it
    if not before.endswith(HALF) and not changes:  # a prompt is a text, so it never ends in half a character
        assert before + "".join(pieces) + rest == whole


@pytest.mark.parametrize("kind", ["byte_pair", "unigram", "sentencepiece"])
def test_a_character_of_several_bytes_comes_whole(kind):
    tokenizer = MADE[kind]
    text = "the cat 🙂 日本 ü"
    ids = tokenizer.encode(text).tolist()
    assert len(ids) > len(text.split())
    pieces, rest = streamed(tokenizer, ids)
    assert "".join(pieces) == text
    assert rest == ""
    assert not any(HALF in piece for piece in pieces)
    assert sum(piece != "" for piece in pieces) > 5  # it does not wait for the end


def test_half_a_character_is_shown_at_the_end_alone():
    ids = MADE["byte_pair"].encode("a🙂").tolist()
    pieces, rest = streamed(MADE["byte_pair"], ids[:-1])
    assert "".join(pieces) == "a"
    assert set(rest) == {HALF}
