import itertools
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from dovetail.base.errors import FileError, InputError, SpecError
from dovetail.base.limits import TOKENIZER_IDS
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


def test_an_id_far_above_the_others_is_refused(tmp_path: Path) -> None:
    """The engine wrote down every unused id below it when it was copied, and aborted for want of memory."""
    for largest, fits in ((TOKENIZER_IDS - 1, True), (TOKENIZER_IDS, False), (4_000_000_000, False)):
        place = hostile(tmp_path, model={"type": "WordLevel", "vocab": {"a": largest}, "unk_token": "a"})
        if fits:
            assert Tokenizer.load(place).prompt("a", add_special=False) == [largest]
            continue
        with pytest.raises(FileError, match=f"has a token of id {largest:,}; the limit is 16,777,216"):
            Tokenizer.load(place)


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


CALLS: dict[str, Callable[[Tokenizer], object]] = {
    "encode": lambda one: one.encode(f"see {END} and {MASK} the cat").tolist(),
    "encode_batch": lambda one: [ids.tolist() for ids in one.encode_batch([f"{END} cat", "the hat"])],
    "prompt": lambda one: one.prompt(f"see {END} and {MASK} the cat"),
    "prompt without special tokens added": lambda one: one.prompt(f"{END} the mat", add_special=False),
    "prompt of plain text": lambda one: one.prompt(f"{END} the mat", recognized=False),
    "pair": lambda one: one.pair(f"the {END}", "cat"),
    "decode": lambda one: one.decode([0, 70, 1, 71]),
    "decode with special tokens": lambda one: one.decode([0, 70, 1, 71], skip_special=False),
    "label": lambda one: one.label(0),
    "to_json": lambda one: one.to_json(),
    "with_special": lambda one: one.with_special(["<|new|>"]).prompt(f"<|new|> {END}"),
    "size and id_of": lambda one: (one.size, one.id_of(END)),
    "refused prompt": lambda one: _refused(lambda: one.prompt("\ud800")),
}


def _refused(call: Callable[[], object]) -> str:
    with pytest.raises(InputError) as caught:
        call()
    return str(caught.value)


def test_no_call_of_a_public_method_changes_what_another_returns():
    fresh = TRAINED.to_json()
    expected = {name: call(_again(fresh)) for name, call in CALLS.items()}
    for first, second in itertools.product(CALLS, CALLS):
        one = _again(fresh)
        assert [CALLS[first](one), CALLS[second](one)] == [expected[first], expected[second]], (first, second)


def _again(text: str) -> Tokenizer:
    return Tokenizer(TRAINED.engine.from_str(text))


def test_a21_threads_share_a_tokenizer(capfd: pytest.CaptureFixture[str]):
    """`prompt` toggled a flag that `encode` reads, and stderr, which is the process's, stayed at /dev/null."""
    one, expected, wrong = _again(TRAINED.to_json()), {name: call(TRAINED) for name, call in CALLS.items()}, list[str]()

    def run(names: list[str]) -> None:
        for name in names * 150:
            if CALLS[name](one) != expected[name]:
                wrong.append(name)
        sys.stderr.write("a thread has ended\n")
        sys.stderr.flush()

    some = [["prompt"], ["prompt without special tokens added", "pair"], ["encode"], ["encode_batch", "decode"]]
    threads = [threading.Thread(target=run, args=(names,)) for names in some]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    os.write(2, b"after\n")
    shown = capfd.readouterr().err
    assert shown.count("a thread has ended") == len(some)
    assert shown.endswith("after\n")
