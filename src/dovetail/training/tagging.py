"""Token classification: a tag per word, as of entities.

    words     Ada         met    Babbage
    tokens    [CLS]  A  ##da  met  Bab  ##bage  [SEP]
    labels    −100   3  −100   0   3     −100    −100      3: B-PER, 0: O

The label of a word is at its first token; other tokens, special ones and padding have none (Devlin et al. 2018). Words without
a token of their own, and those beyond `length` tokens, are left out, and counted. Held-out rows are measured by the accuracy
per word; if the tags are BIO, also by precision, recall and F1 of entities:

    O O B-PER I-PER O B-LOC      ->      (2, 4, PER), (5, 6, LOC)

B-X begins an entity of the type X, I-X continues it; an I-X after another type or after O begins one, as in conlleval
(Tjong Kim Sang & De Meulder 2003). An entity is right if its type and both ends are.
"""

from __future__ import annotations

import dataclasses as dc
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from dovetail.base.errors import FileError, SpecError
from dovetail.data.corpus import Batch
from dovetail.data.rows import TaggedWords, held_out_rows, read_tagged_words
from dovetail.decoding.tagging import EncodedWords, encode_words
from dovetail.disk.model_files import CLASSES_FILE
from dovetail.model.model import Model, ModelModule
from dovetail.nn.layout import TokenLayout
from dovetail.nn.loss import IGNORED, LossSum
from dovetail.spec.fold import over_vocab
from dovetail.spec.scope import Scope
from dovetail.text.tokenizer import Tokenizer
from dovetail.training.objective import NOT_A_SETTING, Labeled, Reads, Setup, with_accuracy
from dovetail.training.rows import FRACTION, row_source
from dovetail.training.source import BatchShape, Note, Rows, Source, TokenizerKind, tokenizer_for

# -- entities ---------------------------------------------------------------------------------------------------------


OUTSIDE = "O"
COUNTS = ("right", "predicted", "labeled")


def are_bio(names: Sequence[str]) -> bool:
    """Whether tags are BIO, with at least one entity among them."""
    entities = [name for name in names if name != OUTSIDE]
    return bool(entities) and all(name[:2] in ("B-", "I-") and len(name) > 2 for name in entities)


def entities(tags: Sequence[str]) -> set[tuple[int, int, str]]:
    """The entities of a row: start, stop and type."""
    found, start, kind = set[tuple[int, int, str]](), 0, ""
    for i, tag in enumerate([*tags, OUTSIDE]):
        own = tag[2:] if tag != OUTSIDE else ""
        if kind and (tag.startswith("B-") or own != kind):
            found.add((start, i, kind))
            kind = ""
        if own and not kind:
            start, kind = i, own
    return found


def count_entities(predicted: Sequence[Sequence[str]], labeled: Sequence[Sequence[str]]) -> dict[str, int]:
    """How many entities of several rows are right, predicted and labeled."""
    pairs = [(entities(one), entities(other)) for one, other in zip(predicted, labeled, strict=True)]
    rights = sum(len(one & other) for one, other in pairs)
    return dict(zip(COUNTS, (rights, sum(len(one) for one, _ in pairs), sum(len(other) for _, other in pairs)), strict=True))


def scores(counts: Mapping[str, float]) -> dict[str, float]:
    """Precision, recall and F1 of counts, or of their means; 0 where there is no entity to divide by."""
    right, predicted, labeled = (counts[name] for name in COUNTS)
    ratios = {"precision": (right, predicted), "recall": (right, labeled), "f1": (2 * right, predicted + labeled)}
    return {name: above / below if below else 0.0 for name, (above, below) in ratios.items()}


# -- the objective ----------------------------------------------------------------------------------------------------


SHOWN = 5  # tags that a message names
ENTITIES = "entities."  # of the counts of entities


@dc.dataclass(frozen=True)
class TokenClassification(Labeled):
    """−log p(tag | the row) at the first token of each word."""

    name, task = "token_classification", "predicting a tag per word"
    reads: ClassVar[Reads] = "tags"
    fresh: ClassVar[str | None] = "head"

    names: tuple[str, ...] = dc.field(default=(), metadata=NOT_A_SETTING)  # of the classes

    def prepare(self, source: Source, setup: Setup) -> tuple[Self, Source]:
        return dc.replace(self, names=tuple(source.classes)), source

    def evaluate(self, model: ModelModule, batch: Batch, seed: int) -> dict[str, LossSum]:
        loss, answers = model.loss_and_answers(*self.arguments(model, batch, seed, False))
        sums = with_accuracy((loss, (answers == batch.labels).sum()))
        if not are_bio(self.names):
            return sums
        counts = count_entities(self._tags(answers, batch.labels), self._tags(batch.labels, batch.labels))
        one = torch.ones((), device=model.device)  # counts per batch, of which the scores take ratios
        return {**sums, **{f"{ENTITIES}{name}": LossSum(one * count, one) for name, count in counts.items()}}

    def metrics(self, means: Mapping[str, float]) -> dict[str, float]:
        counts = {name.removeprefix(ENTITIES): mean for name, mean in means.items() if name.startswith(ENTITIES)}
        rest = {name: mean for name, mean in means.items() if not name.startswith(ENTITIES)}
        return {**super().metrics(rest), **(scores(counts) if counts else {})}

    def _tags(self, classes: Tensor, labels: Tensor) -> list[list[str]]:
        """The names of the classes (batch, n) where there are labels, by row."""
        return [[self.names[i] for i in row[wanted].tolist()] for row, wanted in zip(classes, labels != IGNORED, strict=True)]

    @classmethod
    def check(cls, spec: Model) -> None:
        if spec.encoder is not None:
            raise SpecError("encoder", "tags are predicted in place, without a decoder", "use a spec without an encoder")
        if "embed" not in over_vocab(spec):
            raise SpecError("embed", f"{spec.embed.kind} does not read tokens", "--set embed=tokens")
        head = spec.head
        if head is None or head.pools() or "classes" not in head.axes(Scope()).sizes:
            remedy = '--set "head={kind: token_classifier, classes: 9}", with the number of tags'
            raise SpecError("head", "tags need logits over classes, one per token", remedy)


def from_tags(
    path: Path, spec: Model, kind: TokenizerKind | Tokenizer, shape: BatchShape, note: Note, known: Sequence[str] = ()
) -> Source:
    """Read tagged words, and train a tokenizer on them. `known` are the names of the classes of a head that is trained further;
    by default they are the sorted tags."""
    data = read_tagged_words(path)
    names = _names(path, data, spec, known)
    train, held_out = held_out_rows(len(data.words), FRACTION)
    text = "\n".join(" ".join(data.words[i]) for i in train)
    tokenizer, settings = tokenizer_for(path, text, spec, kind, note)
    rows = encode_words(tokenizer, data.words, shape.length)
    _report_left_out(path, rows, shape.length, note)
    if not are_bio(names):
        note(f"{path}: its tags are not BIO ({_shown(names)}), so entities are not scored; the accuracy is measured")
    number = {name: i for i, name in enumerate(names)}
    classes = [np.array([number[tag] for tag in tags], np.int64) for tags in data.tags]

    def make(which: Rows) -> Batch:
        some = [rows[i] for i in which]
        layout = TokenLayout.padded([len(row.ids) for row in some], max(1, *(len(row.ids) for row in some)))
        tokens, labels = torch.zeros_like(layout.order), torch.full_like(layout.order, IGNORED)
        for i, (row, own) in enumerate(zip(some, (classes[j] for j in which), strict=True)):
            there = row.first >= 0
            tokens[i, : len(row.ids)] = torch.from_numpy(row.ids)
            labels[i, torch.from_numpy(row.first[there])] = torch.from_numpy(own[there])
        return Batch(tokens, labels, layout)

    source = row_source(path, make, train, held_out, shape, tokenizer, {"tags": str(path), **settings}, data.sha256)
    return source._replace(classes=names, files={CLASSES_FILE: f"{json.dumps(names, indent=2)}\n"})


def _names(path: Path, data: TaggedWords, spec: Model, known: Sequence[str]) -> list[str]:
    """The names of the classes in their order."""
    tags = data.names()
    if unknown := [tag for tag in tags if known and tag not in known]:
        remedy = "rename it, or start from a model with another head, which is then initialized anew"
        raise FileError(f"{path}: the tag {unknown[0]!r} is none of the model's ({_shown(known)}); {remedy}")
    names = list(known) or tags
    assert spec.head is not None, "checked before"
    if (classes := spec.head.axes(Scope()).sizes["classes"]) != len(names):
        raise SpecError("head.classes", f"{classes}; {path} has {len(names)} tags", f"--set head.classes={len(names)}")
    return names


def _report_left_out(path: Path, rows: Sequence[EncodedWords], length: int, note: Note) -> None:
    """Tell how many words have no label; raise FileError where none has one."""
    words, labeled = sum(len(row.first) for row in rows), sum(int((row.first >= 0).sum()) for row in rows)
    if labeled == words:
        return
    what = f"{words - labeled:,} of {words:,} words are beyond {length:,} tokens of their row or have no token of their own"
    if not labeled:
        raise FileError(f"{path}: {what}; give a larger --length, or another tokenizer")
    note(f"{path}: {what}, and are left out")


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
