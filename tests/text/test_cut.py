"""Long texts: the ids of `Tokenizer.encode` are those of the engine on the whole text, for every kind of tokenizer."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import AddedToken, Regex, Tokenizer as Engine, models, normalizers, pre_tokenizers, trainers

from dovetail.text import tokenizer as room
from dovetail.text.learn import KINDS, learn
from dovetail.text.split import SPLIT_PATTERNS, cuts_are_exact, pieces
from dovetail.text.tokenizer import PIECE, Tokenizer

TEXT = (
    "The cat sat on the mat; it's  the other cat's hat, 1234 of them.\nÜber allen Gipfeln ist Ruh! 고양이 한 마리 日本語\n" * 20
)
SPECIAL = ["<unk>", "<s>"]


def trained(model: models.Model, trainer: trainers.Trainer, pre_tokenizer=None, normalizer=None) -> Tokenizer:
    engine = Engine(model)
    if pre_tokenizer is not None:
        engine.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        engine.normalizer = normalizer
    engine.train_from_iterator(TEXT.splitlines(keepends=True), trainer)
    return Tokenizer(engine)


def bpe(pre_tokenizer=None, normalizer=None) -> Tokenizer:
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=SPECIAL, show_progress=False)
    return trained(models.BPE(unk_token="<unk>", fuse_unk=True), trainer, pre_tokenizer, normalizer)


def unigram(pre_tokenizer=None, normalizer=None) -> Tokenizer:
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    return trained(models.Unigram(), trainer, pre_tokenizer, normalizer)


def with_added(token: AddedToken) -> Tokenizer:
    made = learn(TEXT, 400)
    made.engine.add_tokens([token])
    return made


LLAMA_3, QWEN = sorted((pattern for pattern in SPLIT_PATTERNS if "(?i:" in pattern), key=len, reverse=True)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
LLAMA_2 = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
XLM_R = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
# cut where the first value of a pair is True, encoded as a whole where it is False
MADE = {
    **{kind: (True, learn(TEXT, 400, kind)) for kind in KINDS},
    "gpt-2": (True, bpe(pre_tokenizers.ByteLevel(add_prefix_space=True))),
    "llama 3": (True, bpe(pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA_3), "isolated"), BYTES]))),
    "qwen": (True, bpe(pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(QWEN), "isolated"), BYTES]), normalizers.NFC())),
    "metaspace": (True, unigram(pre_tokenizers.Metaspace())),
    "metaspace first": (True, bpe(pre_tokenizers.Metaspace(prepend_scheme="first"))),
    "t5": (True, unigram(pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]), XLM_R)),
    "digits": (True, bpe(pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.Metaspace()]))),
    "bert": (True, bpe(pre_tokenizers.BertPreTokenizer(), normalizers.BertNormalizer())),
    "added token": (True, with_added(AddedToken("<tool>", special=False))),
    "llama 2": (False, bpe(normalizer=LLAMA_2)),
    "mistral": (False, bpe(pre_tokenizers.Metaspace(prepend_scheme="first", split=False))),
    "no pre-tokenizer": (False, unigram()),
    "strip": (False, bpe(pre_tokenizers.Metaspace(), normalizers.Strip())),
    "unknown expression": (False, bpe(pre_tokenizers.Split(Regex(r"\w+ \w+|\s|\S"), "isolated"))),
    "added words": (False, with_added(AddedToken("cat sat", special=False))),
    "added letters": (False, with_added(AddedToken("cat", special=False))),
    "added token that strips": (False, with_added(AddedToken("<tool>", special=False, lstrip=True))),
}


def whole(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.engine.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", MADE)
def test_a_tokenizer_is_cut_where_its_components_allow_it(kind: str) -> None:
    assert cuts_are_exact(MADE[kind][1].engine) == MADE[kind][0]


@pytest.mark.parametrize("kind", MADE)
def test_the_ids_of_a_long_text_are_those_of_the_whole(kind: str) -> None:
    """Lines; and one line, of which character 65,536 is inside a word."""
    tokenizer = MADE[kind][1]
    for text in (TEXT * 40, "other " * 20_000):
        assert len(text) > PIECE
        assert tokenizer.encode(text).tolist() == whole(tokenizer, text)


WORDS = st.sampled_from(
    [
        "the",
        "cat",
        "it's",
        "I'LL",
        "Über",
        "1234",
        "x2",
        "<tool>",
        ";",
        "...",
        "日本",
        "한",
        "e\u0301",
        "ﬁ",
        "a\u200d",
        "_",
        "\u0d4e",
    ]
)
GAPS = st.sampled_from([" ", " ", " ", "  ", "\n", " \n", "\n ", "\t", "", "\u00a0", "\u0301", "\r\n", " \u0308"])


@pytest.mark.parametrize("kind", MADE)
@given(parts=st.lists(st.tuples(GAPS, WORDS), max_size=30))
@settings(max_examples=60, deadline=None)
def test_the_ids_of_every_cut_are_those_of_the_whole(kind: str, parts: list[tuple[str, str]]) -> None:
    exact, tokenizer = MADE[kind]
    text = "".join(gap + word for gap, word in parts)
    joined = [i for piece in pieces(text, 1) for i in whole(tokenizer, piece)]
    if exact:
        assert joined == whole(tokenizer, text)


def test_the_cuts_matter() -> None:
    """Where cuts are refused they do change the ids, and a cut inside words changes the ids of tokenizers that allow cuts."""
    text = "The cat sat on the mat and the other cat sat on a hat"
    for kind in ("llama 2", "added words", "unknown expression"):
        tokenizer = MADE[kind][1]
        assert [i for piece in pieces(text, 1) for i in whole(tokenizer, piece)] != whole(tokenizer, text), kind
    for kind in ("byte_pair", "metaspace", "bert"):
        tokenizer = MADE[kind][1]
        assert whole(tokenizer, text[:5]) + whole(tokenizer, text[5:]) != whole(tokenizer, text), kind


@given(text=st.text(alphabet="ab .\n", max_size=40), length=st.integers(1, 12))
@settings(max_examples=200, deadline=None)
def test_pieces_are_the_text_and_as_short_as_its_cuts_allow(text: str, length: int) -> None:
    cut = list(pieces(text, length))
    assert "".join(cut) == text
    assert all(cut)
    for piece, following in itertools.pairwise(cut):
        assert piece[-1].isalpha()
        assert following[0] == " "
        assert following[1].isalpha()
        assert len(piece) <= length or not any(
            piece[i] == " " and piece[i - 1].isalpha() and piece[i + 1].isalpha() for i in range(1, len(piece) - 1)
        )


def test_a_long_text_is_encoded_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, lengths = learn(TEXT, 400), []
    monkeypatch.setattr(
        room, "pieces", lambda text, length: (lengths.append(len(piece)) or piece for piece in pieces(text, length))
    )
    tokenizer.encode(TEXT * 40)
    assert len(lengths) > 1
    assert max(lengths) <= PIECE
