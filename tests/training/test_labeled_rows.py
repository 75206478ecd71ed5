"""Labeled texts, labeled images and pairs: files, batches, and what models learn from them."""

import io
import json
import random
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dovetail as dt
from dovetail.base.errors import FileError, SpecError, UsageError
from dovetail.data.rows import held_out_rows, read_labeled_images, read_labeled_texts, read_pairs
from dovetail.files.spec import from_yaml
from dovetail.model.construction import build
from dovetail.training.loop import measure
from dovetail.training.pairs import Contrastive
from dovetail.training.plan import Plan
from dovetail.training.rows import from_labels
from dovetail.training.source import BatchShape
from dovetail.training.step import Trainer

CLASSIFIER = """
width: 28
vocab: 60
head: {kind: classifier, classes: 3, pooling: mean}
layers: [{mixer: {heads: 2, mask: full}, ffn: {hidden: 44}}]
"""
VECTORS = """
width: 32
vocab: 130
head: pooled_embedding
layers: [{mixer: {heads: 2, mask: full}, ffn: {hidden: 44}}]
"""
VIT = [
    "embed={kind: patches, image: 8, patch: 4, channels: 1}",
    "position.length=5",
    "head={kind: classifier, classes: 10, pooling: mean}",
    "width=60",
    "layers.*.mixer.heads=3",
    "init={kind: normal}",
]
QUIET: dict[str, Any] = {"quiet": True, "tokenizer": "words"}


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def topics(tmp_path: Path) -> Path:
    """Texts of words, sorted by topic; one word in each belongs to the topic."""
    rng = random.Random(0)
    own = {"farm": ["hen", "cow", "hay"], "sea": ["fish", "ship", "salt"], "sky": ["bird", "star", "wind"]}
    rest = [f"w{i}" for i in range(30)]
    rows = []
    for label, words in own.items():
        for _ in range(120):
            text = [*rng.choices(rest, k=rng.randint(2, 7)), rng.choice(words)]
            rng.shuffle(text)
            rows.append({"text": " ".join(text), "label": label})
    return jsonl(tmp_path / "topics.jsonl", rows)


@pytest.fixture
def translations(tmp_path: Path) -> Path:
    """Pairs of four words and their translations in another order; no word is in both texts."""
    rng = random.Random(0)
    words = [a + b for a in "bdfgklmnprst" for b in "aeiou"]
    rows = []
    for _ in range(700):
        chosen = rng.sample(words, 4)
        rows.append({"a": " ".join(chosen), "b": " ".join(rng.sample([word[::-1].upper() for word in chosen], 4))})
    return jsonl(tmp_path / "pairs.jsonl", rows)


# -- what is learned


def test_texts_are_classified(topics: Path, tmp_path: Path) -> None:
    run = dt.train(CLASSIFIER, labels=topics, steps=60, batch=24, learning_rate=1e-2, out=tmp_path / "run", **QUIET)
    told = run.to_dict()
    assert told["held_out_accuracy"] > 0.9  # the largest class is a third
    assert run.history[5].val_metrics is not None
    assert run.history[5].val_metrics["accuracy"] < 0.9
    lines = (tmp_path / "run" / "loss.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["val_metrics"] == {"accuracy": told["held_out_accuracy"]}
    assert ", accuracy " in str(run)
    model = dt.load(tmp_path / "run")
    assert model.tokenizer is not None
    logits = model(torch.tensor(model.tokenizer.prompt("w1 w2 ship w3"))[None])
    assert logits.argmax().item() == 1  # the classes are the sorted labels


def test_pairs_are_matched(translations: Path) -> None:
    spec = from_yaml(VECTORS)
    source = Contrastive.read_pairs(translations, spec, "words", BatchShape(32, 16, 0), lambda line: None)
    before = measure(build(spec), source.held_out, Contrastive())
    assert before["retrieval_at_1"] < 0.2  # chance is 1/32
    run = dt.train(VECTORS, pairs=translations, steps=60, batch=32, length=16, learning_rate=3e-3, **QUIET)
    assert run.to_dict()["held_out_retrieval_at_1"] > 0.8
    assert run.held_out_loss is not None
    assert run.held_out_loss < 0.5 * before["loss"]


def digits(path: Path) -> Path:
    data = pytest.importorskip("sklearn.datasets").load_digits()
    np.savez(path, images=(data.images / 8 - 1).astype(np.float32), labels=data.target)
    return path


def test_images_are_classified(tmp_path: Path) -> None:
    """Two diagonals and two bars, in noise."""
    rng = np.random.default_rng(0)
    shapes = np.stack([np.eye(8), np.eye(8)[::-1], np.eye(8)[[3] * 8], np.eye(8)[[3] * 8].T])
    labels = np.arange(400) % 4
    pixels = np.clip(shapes[labels] * 160 + rng.integers(0, 90, (400, 8, 8)), 0, 255).astype(np.uint8)
    np.savez_compressed(tmp_path / "shapes.npz", images=pixels, labels=labels)
    options: dict[str, Any] = {"batch": 16, "quiet": True, "optimizer": "muon", "learning_rate": 5e-3, "set": VIT}
    run = dt.train("vit-tiny", labels=tmp_path / "shapes.npz", steps=30, out=tmp_path / "run", **options)
    told = run.to_dict()
    assert told["held_out_accuracy"] > 0.9
    assert told["tokens"] == 30 * 16 * 5  # four patches and a class token
    assert run.tokenizer is None
    model = dt.load(tmp_path / "run")
    scaled = torch.from_numpy(pixels[1:3, None].astype(np.float32) / 255 * 2 - 1)
    assert model(scaled).argmax(-1).tolist() == [1, 2]


@pytest.mark.slow
def test_digits_are_classified(tmp_path: Path) -> None:
    options: dict[str, Any] = {"batch": 32, "quiet": True, "optimizer": "muon", "learning_rate": 5e-3, "set": VIT}
    run = dt.train("vit-tiny", labels=digits(tmp_path / "digits.npz"), steps=300, **options)
    assert run.to_dict()["held_out_accuracy"] >= 0.95


# -- batches


def test_an_epoch_holds_every_row_once_and_no_held_out_row(topics: Path) -> None:
    spec, shape = from_yaml(CLASSIFIER), BatchShape(12, 16, 3)
    source = from_labels(topics, spec, "words", shape, lambda line: None)
    assert (source.tokens, source.held_out_tokens, source.unit) == (324, 36, "rows")
    assert source.recorded()["classes"] == ["farm", "sea", "sky"]

    def rows(batches: list[Any]) -> list[tuple[int, ...]]:
        return [
            tuple(row[real].tolist()) for batch in batches for row, real in zip(batch.tokens, batch.layout.real, strict=True)
        ]

    epoch, held_out = [source.batch(step) for step in range(27)], rows(source.held_out)
    assert len(held_out) == 36
    train, held = held_out_rows(360, 0.1)
    assert not set(train) & set(held)
    assert {len(train), len(held)} == {324, 36}
    assert len(set(held // 120)) == 3  # of every class, though the file is sorted
    texts = read_labeled_texts(topics).texts
    assert source.tokenizer is not None
    ids = source.tokenizer.encode_batch(texts)
    assert sorted(rows(epoch)) == sorted(tuple(ids[i].tolist()) for i in train)
    assert sorted(held_out) == sorted(tuple(ids[i].tolist()) for i in held)
    assert rows([source.batch(27)]) != rows([epoch[0]])  # the next epoch has another order
    other = from_labels(topics, spec, "words", shape._replace(seed=4), lambda line: None)
    assert rows([other.batch(0)]) != rows([epoch[0]])
    assert rows(other.held_out) == held_out  # every seed is measured on the same rows
    ranks = [from_labels(topics, spec, "words", shape._replace(rank=r, ranks=2), lambda line: None).batch(5) for r in (0, 1)]
    assert rows(ranks) == rows([epoch[5]])
    assert torch.equal(torch.cat([batch.labels for batch in ranks]), epoch[5].labels)
    assert torch.equal(torch.cat([batch.layout.sample for batch in ranks]), epoch[5].layout.sample)


def test_a_run_on_rows_resumes(topics: Path, tmp_path: Path) -> None:
    """As after kill -9: the last steps were not kept."""
    options: dict[str, Any] = {"labels": topics, "steps": 6, "batch": 24, "checkpoint_minutes": 1e-9, "keep": 9, **QUIET}
    dt.train(CLASSIFIER, out=tmp_path / "run", **options)
    whole = (tmp_path / "run" / "model.safetensors").read_bytes()
    for step in (4, 5, 6):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step-{step:08d}")
    (tmp_path / "run" / "model.safetensors").unlink()
    again = dt.train(CLASSIFIER, out=tmp_path / "run", **options)
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == whole
    assert [metrics.step for metrics in again.history] == [1, 2, 3, 4, 5, 6]
    assert again.history[2].val_metrics is not None  # of an eval before the checkpoint
    jsonl(topics, [{"text": "another file", "label": 1}] * 60)
    with pytest.raises(FileError, match=r"holds another run: recorded\.data\.sha256 is"):
        dt.train(CLASSIFIER, out=tmp_path / "run", **options)


# -- what does not fit


def test_the_loss_of_pairs_has_both_directions_and_is_not_cut() -> None:
    objective = Contrastive(temperature=0.5)
    scores = torch.tensor([[2.0, 0.0], [1.0, 3.0]])
    rows = -torch.log_softmax(scores, -1).diagonal().sum() - torch.log_softmax(scores, 0).diagonal().sum()
    assert objective._loss(scores).item() == pytest.approx(rows.item() / 2)
    with pytest.raises(UsageError, match="contrastive: compares the rows of a batch; train on one rank, with one micro-batch"):
        Trainer(build(from_yaml(VECTORS)), objective, Plan(steps=1, micro_batches=2))


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        (CLASSIFIER, {"set": ["head.classes=2"]}, r"head\.classes: 2; .*topics\.jsonl has 3 \(set head\.classes=3\)"),
        (VECTORS, {}, "head: classification needs logits over classes"),
        ("t5-tiny", {}, "encoder: a class is predicted from one input"),
        ("vit-tiny", {"set": ["head={kind: classifier, classes: 3}"]}, "embed: patches does not read text"),
        (CLASSIFIER, {"objective": "next_token"}, "objective: next_token is trained on text, not on labels; give text"),
        (CLASSIFIER, {"tokens": 500, "steps": None}, "tokens: the rows of labels differ in length"),
        (CLASSIFIER, {"batch": 400}, "360 rows, 36 of them held out, are too few for a batch of 400"),
        (CLASSIFIER, {"sample_every": 1}, "sample_every: a model that learns by classification does not continue a prompt"),
        (CLASSIFIER, {"pairs": "p.jsonl"}, "one of them, not labels and pairs"),
    ],
)
def test_what_does_not_fit_is_refused(topics: Path, spec: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises((SpecError, UsageError, FileError), match=message):
        dt.train(spec, labels=topics, **({"steps": 1, **QUIET} | options))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", r":2: is not JSON"),
        ("[1]", r":2: is not a JSON object"),
        ('{"label": 1}', r""":2: its "text" is missing, not a text; its fields are 'label'"""),
        ('{"text": "", "label": 1}', r':2: its "text" is empty'),
        ('{"text": 3, "label": 1}', r':2: its "text" is int'),
        ('{"text": "a", "label": null}', r':2: its "label" is NoneType, not a string or a whole number'),
        ('{"text": "a", "label": true}', r':2: its "label" is bool'),
        ('{"text": "a", "label": -1}', r"a label is -1; classes are 0 to"),
        ('{"text": "\\ud800", "label": 1}', r":2: its \"text\" holds a lone surrogate"),
    ],
)
def test_damaged_rows_are_refused(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"text": "b", "label": 0}}\n{line}\n')
    with pytest.raises(FileError, match=message):
        read_labeled_texts(path)
    path.write_text(" \n")
    with pytest.raises(FileError, match="is empty"):
        read_pairs(path)


def test_damaged_images_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "images.npz"

    def refused(message: str, **arrays: Any) -> None:
        if arrays:
            np.savez(path, **arrays)
        with pytest.raises(FileError, match=message):
            read_labeled_images(path)

    good, labels = np.zeros((4, 8, 8), np.float32), np.arange(4)
    refused("has no array 'labels'", images=good)
    refused(r"its images are float32 of the shape \(4, 8\)", images=good[0, :4], labels=labels)
    refused("give one whole number per image", images=good, labels=labels[:3])
    refused("give one whole number per image", images=good, labels=labels + 0.5)
    refused("not finite", images=good + np.nan, labels=labels)
    refused("a label is -1", images=good, labels=labels - 1)
    refused("cannot hold|cannot be read", images=np.array([{}] * 4, object), labels=labels)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    refused("cannot be read as .npz")
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (10**9, 64, 64)})
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("images.npy", header.getvalue() + bytes(64))
    refused(r"images is float32 of the shape \(1000000000, 64, 64\), which the file cannot hold")
    np.savez(path, images=np.zeros((20, 9, 8)), labels=np.zeros(20, int))
    with pytest.raises(SpecError, match=r"embed: reads images of \(1, 8, 8\); those of .* are \(1, 9, 8\)"):
        dt.train("vit-tiny", labels=path, steps=1, set=VIT, quiet=True)


def test_the_run_file_of_a_run_on_rows_repeats_it(topics: Path, tmp_path: Path) -> None:
    first = dt.train(CLASSIFIER, labels=topics, steps=3, batch=24, out=tmp_path / "run", **QUIET)
    again = dt.train(tmp_path / "run" / "run.yaml", out=tmp_path / "again", quiet=True)
    assert [step.loss for step in again.history] == [step.loss for step in first.history]
    (comparison,) = dt.runs(tmp_path / "run", tmp_path / "again").comparisons
    assert comparison.fair
    assert not comparison.settings


def test_a_run_on_rows_starts_from_weights_and_their_tokenizer(topics: Path, tmp_path: Path) -> None:
    first = dt.train(CLASSIFIER, labels=topics, steps=2, batch=24, out=tmp_path / "run", **QUIET)
    again = dt.train(from_=tmp_path / "run", labels=topics, steps=2, batch=24, **QUIET)
    assert first.tokenizer is not None
    assert again.tokenizer is not None
    assert first.tokenizer.to_json() == again.tokenizer.to_json()
    assert again.history[0].loss < first.history[0].loss


def test_the_rows_of_a_batch_are_named(translations: Path) -> None:
    source = Contrastive.read_pairs(translations, from_yaml(VECTORS), "words", BatchShape(5, 16, 0), lambda line: None)
    texts = [json.loads(line)["a"] for line in translations.read_text().splitlines()]
    assert source.tokenizer is not None
    for step in (0, 3):
        named = source.where(step)
        rows = [int(number) for number in named.removeprefix("of rows ").partition(" of ")[0].split(", ")]
        assert str(translations) in named
        for tokens, row in zip(source.batch(step).tokens.tolist(), rows, strict=True):
            ids = source.tokenizer.encode(texts[row]).tolist()
            assert tokens[: len(ids)] == ids
