import pytest
import torch

from dovetail.base.errors import FileError
from dovetail.data import corpus as room
from dovetail.data.corpus import Corpus, read_corpus


def test_a_batch_is_drawn_from_seed_and_step_alone():
    corpus = Corpus.cut(torch.arange(1000), 12)
    one, again = (corpus.batch(7, 3, 5, 12) for _ in range(2))
    assert torch.equal(one.tokens, again.tokens)
    assert one.tokens.shape == (5, 12)
    assert one.count == 60
    assert not torch.equal(one.tokens, corpus.batch(7, 4, 5, 12).tokens)
    assert not torch.equal(one.tokens, corpus.batch(8, 3, 5, 12).tokens)


def test_labels_are_the_tokens_one_further():
    batch = Corpus.cut(torch.arange(1000), 12).batch(0, 0, 5, 12)
    assert torch.equal(batch.labels, batch.tokens + 1)
    assert torch.equal(batch.layout.order, torch.arange(12).expand(5, 12))


def test_held_out_tokens_are_never_trained_on_and_all_others_are():
    corpus = Corpus.cut(torch.arange(400), 12, fraction=0.1)
    assert len(corpus.held_out) == 40
    seen = torch.cat([corpus.batch(0, step, 8, 12).labels.flatten() for step in range(300)]).unique()
    first = torch.cat([corpus.batch(0, step, 8, 12).tokens.flatten() for step in range(300)]).min()
    assert first == 0
    assert seen.min() == 1
    assert seen.max() == 359
    tried = torch.cat([batch.tokens.flatten() for batch in corpus.validation(2, 12)])
    assert tried.min() == 360
    assert max(batch.labels.max() for batch in corpus.validation(2, 12)) <= 399
    assert [b.tokens.tolist() for b in corpus.validation(2, 12)] == [b.tokens.tolist() for b in corpus.validation(2, 12)]


def test_the_shortest_text_that_will_do():
    assert len(Corpus.cut(torch.arange(26), 12).train) == 13
    assert Corpus.cut(torch.arange(26), 12).batch(0, 0, 2, 12).tokens.tolist() == [list(range(12))] * 2
    with pytest.raises(FileError, match=r"rhyme\.txt: 25 tokens are too few for sequences of 12; give 26"):
        Corpus.cut(torch.arange(25), 12, name="rhyme.txt")


JSON_FILES = {
    "rows.jsonl": '{"text": "one"}\n\n{"text": "two"}\n',
    "rows.txt": '{"text": "one"}\n{"text": "two"}\n' * 9 + "{broken\n",  # the name does not matter, the first lines do
    "array.json": '[\n  {"text": "one"},\n  {"text": "two"}\n]\n',
    "object.json": '\n{\n  "text": "one"\n}\n',
}
PROSE_FILES = {
    "code.txt": "{\n  int x = 1;\n}\n",
    "mixed.txt": '{"text": "one"}\nis a line of JSON.\n',
    "list.txt": "[1] A footnote.\n[2] Another.\n",
    "deep.txt": "[" * 100_000,
    "number.txt": "42\n",
}


@pytest.mark.parametrize("name", JSON_FILES)
def test_json_is_not_plain_text(name, tmp_path):
    (tmp_path / name).write_text(JSON_FILES[name])
    with pytest.raises(FileError, match=rf"{name}: is JSON, not plain text; extract the text first"):
        read_corpus(tmp_path / name)


@pytest.mark.parametrize("name", PROSE_FILES)
def test_a_text_that_only_begins_like_json_is_plain_text(name, tmp_path):
    (tmp_path / name).write_text(PROSE_FILES[name])
    assert read_corpus(tmp_path / name) == PROSE_FILES[name]


def test_files_that_cannot_be_learned_from_are_named(tmp_path, monkeypatch):
    (tmp_path / "empty.txt").write_text(" \n\n")
    (tmp_path / "latin.txt").write_bytes("café".encode("latin1"))
    (tmp_path / "text.txt").write_text("naïve\n", encoding="utf-8")
    for name, says in (("none.txt", "No such file"), ("empty.txt", "is empty"), ("latin.txt", "byte 3 is not UTF-8")):
        with pytest.raises(FileError, match=rf"{name}: .*{says}"):
            read_corpus(tmp_path / name)
    with pytest.raises(FileError, match="is not a regular file"):
        read_corpus(tmp_path)
    assert read_corpus(tmp_path / "text.txt") == "naïve\n"
    monkeypatch.setattr(room, "TEXT_BYTES", 3)
    with pytest.raises(FileError, match="has 7 bytes; the limit for a text is 3"):
        read_corpus(tmp_path / "text.txt")
