"""A token classifier is trained by one command on tagged words: labels, loss, entities, names of tags, and what is refused."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Engine, models, normalizers, pre_tokenizers, processors

import dovetail as dt
from dovetail.base.errors import FileError, InputError, SpecError, UsageError
from dovetail.data.rows import read_tagged_words
from dovetail.decoding.tagging import encode_words
from dovetail.disk.model_files import CLASSES_FILE, CONFIG_FILE
from dovetail.files.model_dir import save
from dovetail.files.spec import from_yaml
from dovetail.hf.write import export_directory, import_directory
from dovetail.model.construction import build
from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout
from dovetail.nn.loss import IGNORED
from dovetail.text.learn import KINDS, learn
from dovetail.text.tokenizer import Tokenizer
from dovetail.training.loop import measure
from dovetail.training.source import BatchShape
from dovetail.training.tagging import TokenClassification, are_bio, count_entities, entities, from_tags, scores

TAGS = ["B-LOC", "B-PER", "I-LOC", "I-PER", "O"]
BERT = "bert-tiny"
SMALL = ["width=24", "layers.*.mixer.heads=2", "layers.*.ffn.hidden=32", "vocab=40"]
HEAD = "head={kind: token_classifier, classes: 5}"
OPTIONS: dict[str, Any] = {"batch": 8, "length": 24, "quiet": True, "evals": 1}


def wordpieces() -> Tokenizer:
    """BERT's: lower case, [CLS] and [SEP], ##continuations, an accent that is dropped."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces = [*special, "a", "##da", "met", "bab", "##bage", "k", "##ew", "el", "##y", "in", "at"]
    engine = Engine(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    engine.normalizer = normalizers.BertNormalizer(lowercase=True, strip_accents=True)
    engine.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    engine.post_processor = processors.TemplateProcessing(single="[CLS] $0 [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    engine.add_special_tokens(special)
    return Tokenizer(engine)


def rows_of(path: Path, rows: list[tuple[list[str], list[str]]]) -> Path:
    path.write_text("".join(json.dumps({"tokens": words, "tags": tags}) + "\n" for words, tags in rows))
    return path


def sentences(count: int) -> list[tuple[list[str], list[str]]]:
    """People and places of one or two words among others, that a tagger can tell by the words."""
    rng, rows = random.Random(0), []
    for _ in range(count):
        words, tags = list[str](), list[str]()
        for _ in range(rng.randint(2, 4)):
            name, *rest = rng.choice([["met"], ["in"], ["at"], ["ada"], ["ada", "bab"], ["kew"], ["kew", "ely"]])
            kind = {"ada": "PER", "kew": "LOC"}.get(name)
            words += [name, *rest]
            tags += [f"B-{kind}" if kind else "O", *(f"I-{kind}" for _ in rest)]
        rows.append((words, tags))
    return rows


@pytest.fixture
def tagged(tmp_path: Path) -> Path:
    return rows_of(tmp_path / "tagged.jsonl", sentences(80))


# -- words and tokens


def test_e4_the_label_of_a_word_is_at_its_first_token() -> None:
    tokenizer = wordpieces()
    (row,) = encode_words(tokenizer, [["Ada", "met", "Babbage"]])
    pieces = [tokenizer.engine.id_to_token(i) for i in row.ids]
    assert pieces == ["[CLS]", "a", "##da", "met", "bab", "##bage", "[SEP]"]
    assert row.first.tolist() == [1, 3, 4]
    (row,) = encode_words(tokenizer, [["Ada", "met", "Babbage"]], 5)
    assert [tokenizer.engine.id_to_token(i) for i in row.ids] == ["[CLS]", "a", "##da", "met", "[SEP]"]
    assert row.first.tolist() == [1, 3, -1]
    (row,) = encode_words(tokenizer, [["\N{COMBINING ACUTE ACCENT}", "[SEP]", "New a"]])
    assert row.first[0] == -1  # the normalizer drops it
    assert row.ids.tolist().count(3) == 1  # "[SEP]" in the text is text
    assert row.first[2] == row.first[1] + 3  # [, sep as unknown, ]; a word may hold a space
    (row,) = encode_words(tokenizer, [["Ada"]], 1)
    assert row.ids.tolist() == [3]
    assert row.first.tolist() == [-1]


@pytest.mark.parametrize("kind", KINDS)
def test_e4_words_are_found_by_every_kind_of_tokenizer(kind: str) -> None:
    text = [["Ada", "met", "Dr.", "Babbage", "in", "Zürich", "!"], ["日本", "Ada"]]
    tokenizer = learn("\n".join(" ".join(words) for words in text * 20), 290, kind)
    for words, row in zip(text, encode_words(tokenizer, text), strict=True):
        assert row.ids.tolist() == tokenizer.prompt(" ".join(words))  # as the model reads the text otherwise
        assert (row.first >= 0).all()
        assert (np.diff(row.first) > 0).all()
        for word, first, after in zip(words, row.first, [*row.first[1:], len(row.ids)], strict=True):
            assert tokenizer.decode(row.ids[first:after].tolist()).strip().replace(" ", "") in (word, f"{word}<|unknown|>")


def source_of(path: Path, length: int = 24, known: tuple[str, ...] = ()) -> Any:
    notes = list[str]()
    spec = dt.load_spec(BERT).set("vocab", 40).set("head", {"kind": "token_classifier", "classes": 5})
    return from_tags(path, spec, wordpieces(), BatchShape(2, length, 0), notes.append, known), notes


def test_e4_the_loss_is_the_cross_entropy_of_the_labeled_tokens(tmp_path: Path) -> None:
    rows = [
        (["Ada", "met", "Babbage"], ["B-PER", "O", "B-PER"]),
        (["ada"], ["I-PER"]),
        (["Met", "ely", "a"], ["B-LOC", "I-LOC", "O"]),
    ]
    source, notes = source_of(rows_of(tmp_path / "rows.jsonl", rows * 2))
    assert notes == []
    assert list(source.classes) == TAGS
    batch = source.table(np.array([0, 1, 2]))
    none = IGNORED
    assert batch.labels.tolist() == [
        [none, 1, none, 4, 1, none, none],
        [none, 3, none, none, none, none, none],
        [none, 0, 2, none, 4, none, none],
    ]
    model = build(
        from_yaml("""
        {width: 24, vocab: 40, head: {kind: token_classifier, classes: 5},
        layers: [{mixer: {heads: 2, mask: full}, ffn: {hidden: 30}}]}"""),
        seed=3,
    ).double()
    objective = TokenClassification(tuple(TAGS))
    logits = model(batch.tokens, Ctx(layout=batch.layout))
    by_hand = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=none)
    torch.testing.assert_close(objective(model, batch, 0, False).mean(), by_hand)
    torch.testing.assert_close(losses_by_label(model, batch).mean(), by_hand)  # padding is neither read nor predicted
    found = measure(model, [batch], objective)
    wanted = batch.labels != none
    assert found["accuracy"] == pytest.approx((logits.argmax(-1) == batch.labels)[wanted].double().mean().item())
    predicted = [[TAGS[c] for c in row[own].tolist()] for row, own in zip(logits.argmax(-1), wanted, strict=True)]
    by_rows = count_entities(predicted, [tags for _, tags in rows])
    assert {name: found[name] for name in ("precision", "recall", "f1")} == pytest.approx(scores(by_rows))


def losses_by_label(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """The loss of each label, of its row alone."""
    losses = list[torch.Tensor]()
    for i, j in (batch.labels != IGNORED).nonzero().tolist():
        length = int(batch.layout.real[i].sum())
        logits = model(batch.tokens[i : i + 1, :length], Ctx(layout=TokenLayout.whole(1, length)))
        losses.append(-logits.log_softmax(-1)[0, j, batch.labels[i, j]])
    return torch.stack(losses)


def test_e4_words_without_a_label_are_counted(tmp_path: Path) -> None:
    path = rows_of(
        tmp_path / "rows.jsonl", [(["ada", "met"], ["B-PER", "O"]), (["kew", "a"], ["B-LOC", "I-LOC"]), (["a"], ["I-PER"])]
    )
    _, notes = source_of(path, 4)  # [CLS] a ##da [SEP]; k ##ew are two tokens, too
    assert len(notes) == 1
    assert "2 of 5 words are beyond 4 tokens of their row or have no token of their own, and are left out" in notes[0]
    with pytest.raises(FileError, match=r"5 of 5 words .*give a larger --length"):
        source_of(path, 2)


# -- entities


def test_e4_entities_by_hand() -> None:
    assert entities(["O", "O", "B-PER", "I-PER", "O", "B-LOC"]) == {(2, 4, "PER"), (5, 6, "LOC")}
    assert entities(["B-PER", "B-PER", "I-LOC", "I-LOC"]) == {(0, 1, "PER"), (1, 2, "PER"), (2, 4, "LOC")}
    assert entities(["I-PER", "I-PER", "O", "I-PER"]) == {(0, 2, "PER"), (3, 4, "PER")}
    assert entities([]) == entities(["O"]) == set()
    assert are_bio(TAGS)
    assert not any(map(are_bio, (["O"], ["NOUN", "VERB"], ["B-PER", "X"], ["B-", "O"], [])))
    labeled = [["B-PER", "I-PER", "O", "B-LOC"], ["B-LOC"]]
    predicted = [["B-PER", "O", "O", "B-LOC"], ["B-PER"]]  # a wrong end, a right one, a wrong type
    counts = count_entities(predicted, labeled)
    assert counts == {"right": 1, "predicted": 3, "labeled": 3}
    assert scores(counts) == pytest.approx({"precision": 1 / 3, "recall": 1 / 3, "f1": 1 / 3})
    assert scores({"right": 2, "predicted": 2, "labeled": 6}) == pytest.approx({"precision": 1, "recall": 1 / 3, "f1": 0.5})
    assert scores(count_entities([["O"]], [["O"]])) == {"precision": 0, "recall": 0, "f1": 0}


# -- the command


@pytest.mark.slow
def test_e4_tags_train_a_token_classifier(tagged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from dovetail.cli import main

    flags = [f"--set={change}" for change in [*SMALL, HEAD]]
    flags += ["--tokenizer", "words", "--batch", "8", "--length", "24", "--steps", "100", "--learning-rate", "0.01"]
    with pytest.raises(SystemExit) as end:
        main(["train", BERT, "--tags", str(tagged), *flags, "--evals", "1", "-o", str(tmp_path / "run"), "--json"])
    assert end.value.code == 0
    result = json.loads(capsys.readouterr().out)
    assert [result[f"held_out_{name}"] for name in ("accuracy", "precision", "recall", "f1")] == [1, 1, 1, 1]
    model = dt.load(tmp_path / "run")
    assert model.class_names == tuple(TAGS)
    assert model.tag(["ada", "bab", "met", "kew", "ely"]) == ["B-PER", "I-PER", "O", "B-LOC", "I-LOC"]
    dt.save(model, tmp_path / "saved")
    assert dt.load(tmp_path / "saved").class_names == tuple(TAGS)
    again = dt.train(str(tmp_path / "run" / "run.yaml"), quiet=True)  # complete: nothing is trained
    assert again.to_dict()["held_out_f1"] == 1

    export_directory(tmp_path / "run", tmp_path / "theirs")
    config = json.loads((tmp_path / "theirs" / CONFIG_FILE).read_text())
    assert config["architectures"] == ["BertForTokenClassification"]
    assert list(config["id2label"].values()) == TAGS
    (tmp_path / "theirs" / CLASSES_FILE).unlink()
    import_directory(tmp_path / "theirs", tmp_path / "back")
    assert dt.load(tmp_path / "back").class_names == tuple(TAGS)


@pytest.fixture
def encoder(tmp_path: Path) -> Path:
    """A directory in Hugging Face layout: a random BertModel, with its tokenizer."""
    spec = dt.load_spec(BERT)
    for change in SMALL:
        path, _, value = change.partition("=")
        spec = spec.set(path, int(value))
    save(build(spec, seed=5), spec, tmp_path / "own", {"tokenizer.json": wordpieces().to_json().encode()})
    export_directory(tmp_path / "own", tmp_path / "encoder", "bert")
    (tmp_path / "encoder" / "dovetail.yaml").unlink()
    return tmp_path / "encoder"


def test_e4_an_imported_encoder_gets_a_new_head(encoder: Path, tagged: Path, tmp_path: Path) -> None:
    notes = list[str]()
    options = {**OPTIONS, "learning_rate": 0.01, "note": notes.append}
    run = dt.train(tags=tagged, from_=encoder, set=[HEAD], steps=1, out=tmp_path / "one", **{**options, "learning_rate": 1e-9})
    assert f"head: other weights than those of {encoder}, initialized anew" in notes
    table = dt.load(encoder).embed.table  # type: ignore[union-attr]
    torch.testing.assert_close(run.model.embed.table, table, rtol=0, atol=1e-6)  # type: ignore[union-attr]
    run = dt.train(tags=tagged, from_=encoder, set=[HEAD], steps=60, out=tmp_path / "run", **options)
    assert run.to_dict()["held_out_f1"] > 0.9
    model = dt.load(tmp_path / "run")
    assert model.tag(["Ada", "met", "Kew"]) == ["B-PER", "O", "B-LOC"]
    assert model.tag(["\N{COMBINING ACUTE ACCENT}", "ada"]) == [None, "B-PER"]
    with pytest.raises(UsageError, match="adapter: the head is new, and would stay random"):
        dt.train(tags=tagged, from_=encoder, set=[HEAD], steps=1, adapter="lora", **options)
    with pytest.raises(UsageError, match=r"only: the head is new, and would stay random; also name its weights: 'head\.\*'"):
        dt.train(tags=tagged, from_=encoder, set=[HEAD], steps=1, only="layers.*", **options)
    # of another objective: as before
    with pytest.raises(FileError, match=r"has head\.out\.weight of shape \[24, 24\].*`dovetail graft"):
        dt.train(labels=tagged, from_=encoder, set=["head={kind: classifier, classes: 2}"], steps=1, **options)


def test_e4_a_tagger_that_is_trained_further_keeps_its_tags(encoder: Path, tagged: Path, tmp_path: Path) -> None:
    dt.train(tags=tagged, from_=encoder, set=[HEAD], steps=1, out=tmp_path / "run", **OPTIONS)
    fewer = rows_of(tmp_path / "fewer.jsonl", [(["kew", "met"], ["B-LOC", "O"])] * 20)  # two of the five tags
    dt.train(tags=fewer, from_=tmp_path / "run", steps=1, out=tmp_path / "second", **OPTIONS)
    assert dt.load(tmp_path / "second").class_names == tuple(TAGS)
    other = rows_of(tmp_path / "other.jsonl", [(["kew", "met"], ["B-ORG", "O"])] * 20)
    with pytest.raises(FileError, match=r"the tag 'B-ORG' is none of the model's \(B-LOC, B-PER, I-LOC, I-PER, O\); rename it"):
        dt.train(tags=other, from_=tmp_path / "run", steps=1, **OPTIONS)


def test_e4_tags_that_are_no_entities_have_an_accuracy(tmp_path: Path) -> None:
    path, notes = rows_of(tmp_path / "pos.jsonl", [(["ada", "met"], ["NOUN", "VERB"])] * 20), list[str]()
    head = "head={kind: token_classifier, classes: 2}"
    run = dt.train(BERT, tags=path, set=[*SMALL, head], steps=1, tokenizer="words", note=notes.append, **OPTIONS)
    assert any("its tags are not BIO (NOUN, VERB), so entities are not scored" in note for note in notes)
    assert set(run.history[-1].val_metrics or {}) == {"accuracy"}


# -- what is refused


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"tokens": ["a", "b"], "tags": ["O"]}, r"has 2 tokens and 1 tags; give one tag per token"),
        ({"tokens": "a b", "tags": ["O", "O"]}, r'its "tokens" is str; give a list of strings'),
        ({"tokens": ["a"]}, r'its "tags" is missing; give a list of strings'),
        ({"tokens": [], "tags": []}, r'its "tokens" is empty; give a list of strings'),
        ({"tokens": ["a"], "tags": [3]}, r'its "tags\[0\]" is int, not a text'),
        ({"tokens": ["a", " "], "tags": ["O", "O"]}, r'its "tokens\[1\]" is empty'),
        ({"tokens": ["a"], "tags": [""]}, r'its "tags\[0\]" is empty'),
        ({"tokens": ["\ud800"], "tags": ["O"]}, r"lone surrogate"),
        (["a"], r"is not a JSON object"),
    ],
)
def test_e4_wrong_rows_are_refused(row: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"tokens": ["a"], "tags": ["O"]}) + "\n\n" + json.dumps(row) + "\n")
    with pytest.raises(FileError, match=rf"rows\.jsonl:3: {message}" if "surrogate" not in message else message):
        read_tagged_words(path)


def test_e4_wrong_specs_are_refused(tagged: Path) -> None:
    def refused(message: str, *changes: str, spec: str = BERT, **more: Any) -> None:
        with pytest.raises((SpecError, UsageError), match=message):
            dt.train(spec, tags=tagged, set=changes, steps=1, tokenizer="words", **OPTIONS, **more)

    refused(r'head: tags need logits over classes, one per token \(set "head=\{kind: token_classifier', *SMALL)
    refused(r"head: tags need logits", *SMALL, "head={kind: classifier, classes: 5}")
    refused(r"head\.classes: 7; .*tagged\.jsonl has 5 tags \(set head\.classes=5\)", *SMALL, HEAD, "head.classes=7")
    refused(r"encoder: tags are predicted in place", spec="t5-tiny")
    refused(r"one of them, not labels and tags", *SMALL, HEAD, labels=tagged)
    refused(r"objective: classification is trained on labels, not on tags", *SMALL, HEAD, objective="classification")
    refused(r"tokens: the rows of tags differ in length", *SMALL, HEAD, tokens=100)


def test_e4_what_cannot_be_tagged_is_refused(encoder: Path, tagged: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"head: the model has no class per token"):
        dt.load(encoder).tag(["ada"])
    dt.train(tags=tagged, from_=encoder, set=[HEAD], steps=1, out=tmp_path / "run", **OPTIONS)
    model = dt.load(tmp_path / "run")
    call: Callable[[Any], Any] = model.tag
    for words in ("ada", [], ["ada", ""], [3]):
        with pytest.raises(InputError, match=r"words: give a list of words"):
            call(words)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"words: are 1,\d+ tokens; the model takes at most \d+"):
        model.tag(["ada"] * 600)
    (tmp_path / "run" / CLASSES_FILE).write_text('{"0": "O"}')
    with pytest.raises(FileError, match=r"class_names\.json: it is .* not a list"):
        dt.load(tmp_path / "run")
    (tmp_path / "run" / CLASSES_FILE).unlink()
    nameless = dt.load(tmp_path / "run")
    assert nameless.class_names is None
    assert set(nameless.tag(["ada"])) <= set(range(5))
    model.vocabulary = None
    with pytest.raises(InputError, match=r"words: the model has no tokenizer"):
        model.tag(["ada"])
