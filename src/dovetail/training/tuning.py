"""Tuning on the rows of a file (data/chats.py), encoded by the model's own tokenizer and chat template (text/conversation.py).

    sft      −log p(yᵢ | x, y₁ … yᵢ₋₁)  over the tokens of answers alone, end-of-turn tokens included;  x: what is before them
    distill  a student learns the teacher's probs of every answer token, not the token alone

    packed   a a a a b b b │ c c c c c c ·      several examples per row, each attends to itself alone; · padding
    labels   − a a − b b −   − − c c c − −      the next token, where it is an answer's

A tenth of the rows is held out. Rows that are longer than `length` tokens are left out, and counted: cut ones would teach
answers without an end.

    forward    Σᵥ q(v) (log q(v) − log p(v))         covers all that the teacher says                    Hinton et al. 2015
    reverse    Σᵥ p(v) (log p(v) − log q(v))         avoids what the teacher would not say               Gu et al. 2023

p: the student, q: the teacher, both of logits / temperature; a sum over the tokens of answers. Both have one vocabulary.
"""

from __future__ import annotations

import bisect
import dataclasses as dc
import hashlib
import heapq
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from torch import Tensor

from dovetail.base.errors import FileError, UsageError, did_you_mean
from dovetail.base.limits import TEMPLATE_BYTES
from dovetail.data.chats import TuningRow, read_answers
from dovetail.data.corpus import Batch
from dovetail.data.rows import held_out_rows
from dovetail.decoding.generation import Vocabulary
from dovetail.disk.model_files import GENERATION_FILE, TEMPLATE_FILE, TOKENIZER_FILE
from dovetail.disk.untrusted import parse_object, read_regular
from dovetail.model.model import Model, ModelModule
from dovetail.nn.layout import TokenLayout
from dovetail.nn.loss import IGNORED, LossSum
from dovetail.text.chat import ChatTemplate
from dovetail.text.conversation import Encoded, TurnEncoder
from dovetail.training.objective import NOT_A_SETTING, NextToken, Objective, Reads, Setup, TuningData, context
from dovetail.training.rows import FRACTION, row_source
from dovetail.training.source import BatchShape, Note, Rows, Source, check_vocab

PLAIN_TEMPLATE = "plain"
MULTIPLE = 16  # of which the tokens of a padded row are one: fewer shapes, and chunks of rows are whole
NAMED = 3  # rows that a message names


class TuningObjective(Objective):
    """An objective on tuning rows."""

    reads: ClassVar[Reads] = "chats"
    settings = ("template",)

    @classmethod
    def check(cls, spec: Model) -> None:
        NextToken.check(spec)

    @classmethod
    def read(cls, path: Path, spec: Model, shape: BatchShape, note: Note, data: TuningData) -> Source:
        """Read answers, several per row."""
        rows = TuningRows(path, *read_answers(path), spec, shape, note, data)
        packs = Packs([one for (one,) in rows.encoded], rows.parts, shape)
        names = [" + ".join(rows.rows[i].where for i in pack) for pack in packs.packs]
        return rows.source(packs.batch, packs.train, packs.held_out, names)


class Sft(TuningObjective, NextToken):
    """Supervised fine-tuning: the next token of answers alone."""

    name, task, generates = "sft", "predicting the tokens of answers", False
    accuracy = True

    def metrics(self, means: Any) -> dict[str, float]:
        return {**super().metrics(means), "accuracy": means["accuracy"]}


class TuningRows:
    """The rows of a file that fit into `length` tokens, encoded; the rows to train on and those held out."""

    def __init__(
        self, path: Path, rows: Sequence[TuningRow], sha256: str, spec: Model, shape: BatchShape, note: Note, data: TuningData
    ) -> None:
        self.path, self.shape, self.data = path, shape, data
        self.encoder = turn_encoder(data.vocabulary, data.options.get("template"), data.origin)
        check_vocab(self.encoder.tokenizer.size, spec, data.origin)
        encoded = iter(self.encoder.encode([(row.where, example) for row in rows for example in row.examples]))
        both = [(row, tuple(next(encoded) for _ in row.examples)) for row in rows]
        fitting = [(row, some) for row, some in both if max(len(one.ids) for one in some) <= shape.length]
        if len(fitting) < len(both):
            first = next(row for row, some in both if max(len(one.ids) for one in some) > shape.length)
            what = f"{len(both) - len(fitting):,} of {len(both):,} rows are longer than {shape.length:,} tokens"
            if not fitting:
                raise FileError(f"{path}: {what}; give a larger --length")
            note(f"{path}: {what} and left out, the first is {first.where}")
        self.rows = [row for row, _ in fitting]
        self.encoded = [some for _, some in fitting]
        self.parts = held_out_rows(len(self.rows), FRACTION)
        self.sha256 = _digest(sha256, [one for some in self.encoded for one in some])

    def source(self, make: Any, train: Rows, held_out: Rows, names: Sequence[str] | None = None) -> Source:
        """The source of batches that `make` makes."""
        names = [row.where for row in self.rows] if names is None else names
        tokenizer, settings = self.encoder.tokenizer, {"chats": str(self.path)}
        found = row_source(self.path, make, train, held_out, self.shape, tokenizer, settings, self.sha256, names)
        return found._replace(files=self.files())

    def files(self) -> dict[str, str]:
        """The template that was given, and the end tokens, so that generation ends where answers do."""
        template = {} if "template" not in self.data.options else {TEMPLATE_FILE: _text_of(self.encoder)}
        ends = {int(some[0].ids[-1]) for some in self.encoded}
        known = self.data.vocabulary.stop
        if ends <= known:
            return template
        before = parse_object(self.data.vocabulary.files.get(GENERATION_FILE, b"{}"), GENERATION_FILE)
        return {**template, GENERATION_FILE: f"{json.dumps({**before, 'eos_token_id': sorted(known | ends)}, indent=2)}\n"}


class Packs:
    """Examples in rows of at most `length` tokens; the rows to train on come first."""

    def __init__(self, encoded: Sequence[Encoded], parts: tuple[Rows, Rows], shape: BatchShape) -> None:
        self.encoded, self.length = encoded, shape.length
        at_least = (shape.batch, 1)
        train, held_out = (
            pack([len(encoded[i].ids) for i in rows], shape.length, least) for rows, least in zip(parts, at_least, strict=True)
        )
        self.packs = [[int(rows[i]) for i in one] for rows, some in zip(parts, (train, held_out), strict=True) for one in some]
        self.train, self.held_out = np.arange(len(train)), np.arange(len(train), len(self.packs))

    def batch(self, rows: Rows) -> Batch:
        """The batch of some rows."""
        examples = [[self.encoded[i] for i in self.packs[row]] for row in rows]
        return Batch(*packed_batch(examples, self.length))


def packed_batch(rows: Sequence[Sequence[Encoded]], length: int) -> tuple[Tensor, Tensor, TokenLayout]:
    """Tokens, labels (batch, n) and the layout of rows of examples, padded to a multiple of MULTIPLE."""
    longest = max(sum(len(one.ids) for one in row) for row in rows)
    n = max(longest, min(-(-longest // MULTIPLE) * MULTIPLE, length))
    tokens, labels = torch.zeros(len(rows), n, dtype=torch.long), torch.full((len(rows), n), IGNORED)
    for i, row in enumerate(rows):
        offset = 0
        for one in row:
            stop = offset + len(one.ids)
            tokens[i, offset:stop], labels[i, offset:stop] = torch.from_numpy(one.ids), labels_of(one)
            offset = stop
    return tokens, labels, TokenLayout.packed([[len(one.ids) for one in row] for row in rows], n)


def labels_of(encoded: Encoded) -> Tensor:
    """(n,) what each token of an example predicts: the next one where it is an answer's, else −100."""
    following = np.where(encoded.answer[1:], encoded.ids[1:], IGNORED)
    return torch.from_numpy(np.append(following, IGNORED))


def pack(lengths: Sequence[int], capacity: int, least: int = 1) -> list[list[int]]:
    """Put items of some lengths into packs of at most `capacity`: the longest first, each into the fullest pack that has room
    (best fit). Where that makes fewer than `least` packs, as many are filled evenly."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    packs, room = list[list[int]](), list[tuple[int, int]]()  # (room, pack), sorted
    for i in order:
        at = bisect.bisect_left(room, (lengths[i], -1))
        free, number = room.pop(at) if at < len(room) else (capacity, len(packs))
        if number == len(packs):
            packs.append([])
        packs[number].append(i)
        bisect.insort(room, (free - lengths[i], number))
    if len(packs) >= least or len(lengths) < least:
        return packs
    packs, filled = [[] for _ in range(least)], [(0, number) for number in range(least)]
    for i in order:
        size, number = heapq.heappop(filled)
        packs[number].append(i)
        heapq.heappush(filled, (size + lengths[i], number))
    return packs


def turn_encoder(vocabulary: Vocabulary, template: str | None, origin: str) -> TurnEncoder:
    """Return what encodes rows for a model. `template` takes the place of the model's own: a file, or "plain"."""
    if vocabulary.tokenizer is None:
        raise FileError(f"{origin}: holds no {TOKENIZER_FILE} to encode the rows by")
    encoder = TurnEncoder(vocabulary.tokenizer, vocabulary.stop, vocabulary.chat_template, origin)
    if template is None:
        return encoder
    if template == PLAIN_TEMPLATE:
        return encoder.plain()
    if not Path(template).is_file():
        hint = did_you_mean(template, [PLAIN_TEMPLATE]) or "give a .jinja file, or plain"
        raise FileError(f"--template: there is no file {template}; {hint}")
    text = read_regular(Path(template), TEMPLATE_BYTES, "a chat template")
    tokens = {} if encoder.template is None else encoder.template.tokens
    return TurnEncoder(vocabulary.tokenizer, vocabulary.stop, ChatTemplate(text, template, tokens), origin)


def _text_of(encoder: TurnEncoder) -> str:
    assert encoder.template is not None, "a template was given"
    return encoder.template.text


def _digest(sha256: str, encoded: Sequence[Encoded]) -> str:
    """The SHA-256 of a file and of what was made of it: a template that writes today's date makes other tokens tomorrow."""
    found = hashlib.sha256(sha256.encode())
    for one in encoded:
        found.update(one.ids.tobytes())
        found.update(one.answer.tobytes())
    return found.hexdigest()


# -- distillation -----------------------------------------------------------------------------------------------------


CHUNK = 256  # tokens whose logits are in memory at one time


@dc.dataclass(frozen=True)
class Distill(TuningObjective):
    """Distillation from a teacher's directory."""

    name, task = "distill", "predicting the teacher's probabilities"

    teacher: str | None = None  # a model directory
    direction: Literal["forward", "reverse"] = "forward"
    temperature: float = 1.0
    model: Any = dc.field(default=None, metadata=NOT_A_SETTING)

    def divergence(self, student: Tensor, teacher: Tensor) -> Tensor:
        """(tokens,) the divergence of logits (tokens, vocab)."""
        p, q = (torch.log_softmax(one / self.temperature, -1) for one in (student, teacher))
        return ((q.exp() * (q - p)) if self.direction == "forward" else (p.exp() * (p - q))).sum(-1)

    def __call__(self, model: ModelModule, batch: Batch, seed: int, training: bool) -> LossSum:
        ctx, wanted = context(batch, seed, training), batch.labels != IGNORED
        x, inner = model.hidden(batch.tokens, ctx)
        with torch.no_grad():
            y, theirs = self.model.hidden(batch.tokens, context(batch, 0, False))
        total = x.new_zeros((), dtype=torch.promote_types(x.dtype, torch.float32))
        for ours, teachers in zip(x[wanted].split(CHUNK), y[wanted].split(CHUNK), strict=True):
            with torch.no_grad():
                target = self.model.head(teachers, theirs)
            logits = model.head(ours, inner)
            total = total + self.divergence(logits.to(total.dtype), target.to(total.dtype)).sum()
        return LossSum(total + ctx.with_added(total.new_zeros(())) * wanted.sum(), wanted.sum())

    def prepare(self, source: Source, setup: Setup) -> tuple[Self, Source]:
        if self.direction not in ("forward", "reverse"):
            raise UsageError(f"--direction: {self.direction!r} is neither forward nor reverse")
        if self.teacher is None:
            raise UsageError("--teacher: give the directory of the model to learn from")
        if self.temperature <= 0:
            raise UsageError(f"--temperature: {self.temperature} is not above 0; it divides the logits")
        if setup.ranks.count > 1:
            raise UsageError("distill: runs on one rank")
        teacher = setup.load(self.teacher).to(dtype=setup.model.dtype).requires_grad_(False)
        own = source.tokenizer
        if teacher.part.vocab != setup.model.part.vocab or (
            teacher.tokenizer is not None and own is not None and teacher.tokenizer.to_json() != own.to_json()
        ):
            raise FileError(f"{self.teacher}: its tokenizer or vocabulary is not the student's; token by token they must agree")
        return dc.replace(self, model=teacher), source
