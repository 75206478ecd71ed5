import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from dovetail.core.errors import FileError, InputError, SpecError
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


def test_it_is_saved_as_one_file(tmp_path):
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


# -- bounds of an untrusted tokenizer.json


def hostile(place: Path, **changes: Any) -> Path:
    """A directory whose tokenizer.json is a valid one with some components replaced."""
    data = json.loads(learn("some words of a text " * 20, 270).to_json()) | changes
    (place / TOKENIZER_FILE).write_text(json.dumps(data))
    return place


def nested(levels: int) -> dict[str, Any]:
    normalizer: dict[str, Any] = {"type": "Lowercase"}
    for _ in range(levels):
        normalizer = {"type": "Sequence", "normalizers": [normalizer]}
    return normalizer


def adding(count: int) -> dict[str, Any]:
    special = {"<|end|>": {"id": "<|end|>", "ids": [0] * count, "tokens": ["<|end|>"] * count}}
    single = [{"SpecialToken": {"id": "<|end|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    return {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": special}


def test_a_nested_normalizer_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    Tokenizer.load(hostile(tmp_path, normalizer=nested(3)))
    for levels in (20, 400):
        with pytest.raises(FileError, match="levels deep; the limit is 16"):
            Tokenizer.load(hostile(tmp_path, normalizer=nested(levels)))


def test_brackets_in_strings_are_not_levels(tmp_path: Path) -> None:
    pre = {"type": "Split", "pattern": {"String": '[{"' * 100}, "behavior": "Isolated", "invert": False}
    Tokenizer.load(hostile(tmp_path, pre_tokenizer=pre))


def test_special_tokens_of_a_template_are_bounded(tmp_path: Path) -> None:
    assert len(Tokenizer.load(hostile(tmp_path, post_processor=adding(3))).prompt("a")) > 3
    with pytest.raises(FileError, match="adds 2,000 special tokens to a prompt; the limit is 1,024"):
        Tokenizer.load(hostile(tmp_path, post_processor=adding(2000)))


def test_text_that_is_no_unicode_is_refused() -> None:
    tokenizer = learn("some words of a text " * 20, 270)
    for encode in (tokenizer.encode, tokenizer.prompt):
        with pytest.raises(InputError, match="character 1 of the text is not Unicode"):
            encode("a\udc80")


def test_a_panic_of_the_engine_is_an_error_without_a_page_on_stderr(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    post = adding(3) | {"special_tokens": {}}
    with pytest.raises(FileError, match="cannot be read as a tokenizer"):
        Tokenizer.load(hostile(tmp_path, post_processor=post))
    assert "panicked" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "normalizer",
    [
        {"type": "Prepend", "prepend": "y" * 1_000_000},
        {"type": "Replace", "pattern": {"Regex": ".*"}, "content": "x" * 100_000},
        {"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": {"String": "x"}, "content": "x" * 10}] * 6},
    ],
)
def test_normalizers_that_lengthen_a_text_without_bound_are_refused(normalizer: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"lengthen a text .* the limit is 64"):
        Tokenizer.load(hostile(tmp_path, normalizer=normalizer))
