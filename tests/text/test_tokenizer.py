import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.core.errors import FileError, SpecError
from dovetail.text.learn import LEAST, learn
from dovetail.text.tokenizer import END, MASK, TOKENIZER_FILE, Tokenizer

TEXT = "the cat sat on the mat, the other cat sat on the hat.\n" * 20
TRAINED = learn(TEXT, 270)


@given(st.text(max_size=200))
@settings(max_examples=200, deadline=None)
def test_any_text_comes_back(text):
    assert TRAINED.decode(TRAINED.encode(text)) == text


def test_long_texts_are_cut_and_come_back():
    long = "word " * 40_000 + "\n" + TEXT * 200
    assert TRAINED.decode(TRAINED.encode(long)) == long


def test_the_vocabulary_is_as_large_as_asked_and_shortens_the_text():
    assert TRAINED.size == 270
    assert len(TRAINED.encode(TEXT)) < 0.5 * len(TEXT)
    assert int(TRAINED.encode(TEXT).max()) < 270
    assert learn("ab", 1000).size < 300  # no more pairs to merge
    with pytest.raises(SpecError, match=f"vocab: 257 is too small: .* {LEAST}"):
        learn(TEXT, 257)


def test_special_tokens_have_ids_that_no_text_can_spell():
    assert (TRAINED.id_of(END), TRAINED.id_of(MASK)) == (0, 1)
    ids = TRAINED.encode(f"see {END} and {MASK}")
    assert int(ids.min()) > 1
    assert TRAINED.decode(ids) == f"see {END} and {MASK}"
    assert TRAINED.decode([0, *TRAINED.encode("cat"), 1]) == "cat"


def test_it_is_kept_as_one_file(tmp_path):
    (tmp_path / TOKENIZER_FILE).write_text(TRAINED.to_json(), encoding="utf-8")
    again = Tokenizer.load(tmp_path)
    assert again.encode(TEXT + "<|end|> ü").tolist() == TRAINED.encode(TEXT + "<|end|> ü").tolist()
    assert again.to_json() == TRAINED.to_json()
    (tmp_path / TOKENIZER_FILE).write_text("{}")
    with pytest.raises(FileError, match=r"tokenizer\.json: cannot be read as a tokenizer"):
        Tokenizer.load(tmp_path)
    with pytest.raises(FileError, match=r"nowhere: no such directory"):
        Tokenizer.load(tmp_path / "nowhere")


def test_labels_show_spaces_and_line_ends():
    assert [TRAINED.label(int(i)) for i in TRAINED.encode(" the\n")] == ["·the", "↵"]
    assert TRAINED.label(0) == END
    assert TRAINED.label(int(TRAINED.encode("\x07")[0])) == r"\x07"
