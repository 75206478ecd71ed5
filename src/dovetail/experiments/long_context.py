"""Long context, measured: how often a model answers tasks whose answer stands far back, on a grid of lengths and depths.

    needle        32   64  128           used length of a task: the longest at which the mean accuracy over depths reaches the
    depth 0.0    1.00 0.98 0.02          threshold, as it does at every shorter one. The claimed length is a promise; this is
    depth 1.0    1.00 1.00 1.00          what the model does with it                            (RULER, Hsieh et al. 2024)

The rows are those of the synthetic tasks (data/tasks), over the ordinary tokens of the model's vocabulary; a model reads them
in chunks, with its decode state between them. Accuracy is the fraction of answers that are the most probable token.

What a state of B bits bounds. A causal model carries what it has read past a position only in its decode state. If n
independent answers of V choices each must pass there, B bits allow at most the accuracy a of every answer on average for which
log₂ V − h(1 − a) − (1 − a) log₂(V − 1) = B/n (Fano's inequality; h is the binary entropy), whatever its weights.

It is not a linear probe of activations: that is `dovetail.look.probing`.
"""

from __future__ import annotations

import dataclasses as dc
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import torch
from torch import Tensor

from dovetail.account import Account, format_value, longest_length
from dovetail.base.errors import UsageError
from dovetail.base.value import type_problem
from dovetail.data.tasks.context import AtDepth
from dovetail.data.tasks.task import SyntheticTask, read_synthetic_task
from dovetail.decoding.generation import PIECE
from dovetail.decoding.scoring import probable_tokens, token_losses
from dovetail.disk.shape import data_sha256
from dovetail.model.model import Model
from dovetail.model.transformer import Transformer
from dovetail.nn.loss import IGNORED
from dovetail.training.source import corpus_for

TASKS = ("needle", "multi_key", "multi_hop", "variable_tracking", "aggregation", "far_copy")
LENGTHS = (64, 128, 256, 512, 1024)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
HALVINGS = 60  # of the interval in which an accuracy is searched
Watch = Callable[[int, int, str], None]  # cells that are complete, in all, the task
PROBE = "probe"  # the argument of a run with what its model is probed by


@dc.dataclass(frozen=True)
class ContextDesign:
    """Which tasks are measured, at which lengths and depths."""

    tasks: tuple[SyntheticTask, ...] = ()  # () stands for TASKS
    lengths: tuple[int, ...] = LENGTHS
    depths: tuple[float, ...] = DEPTHS
    rows: int = 32
    threshold: float = 0.85  # as RULER's, of Llama-2-7B at 4,096 tokens
    chunk: int = PIECE
    seed: int = 0

    @staticmethod
    def read(tasks: Sequence[Any] = (), **fields: Any) -> ContextDesign:
        """The design with these tasks, each a name, a mapping or YAML; raise UsageError for what cannot be measured."""
        found = tuple(read_synthetic_task(task) for task in tasks or TASKS)
        read: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
        design = ContextDesign(found, **read)
        if not design.lengths or not design.depths:
            raise UsageError("--lengths, --depths: give at least one of each")
        for flag, values, low, high in (
            ("lengths", design.lengths, 1, math.inf),
            ("depths", design.depths, 0, 1),
            ("threshold", (design.threshold,), 0, 1),
            ("rows", (design.rows,), 1, math.inf),
            ("chunk", (design.chunk,), 1, math.inf),
        ):
            if wrong := [value for value in values if not low <= value <= high]:
                raise UsageError(f"--{flag}: {wrong[0]:g} is not from {low} to {high:g}")
        kinds = [task.to_data() for task in found]
        if twice := [task for i, task in enumerate(kinds) if task in kinds[:i]]:
            raise UsageError(f"--task: {twice[0]} is given twice")
        if deep := [task for task in found if isinstance(task, AtDepth) and task.depth is not None]:
            raise UsageError(f"--task: leave out the depth of {deep[0].to_data()}; --depths has those that are measured")
        return dc.replace(design, lengths=tuple(sorted(set(design.lengths))), depths=tuple(sorted(set(design.depths))))


@dc.dataclass(frozen=True)
class ContextCell:
    """The accuracy of a task at a length and a depth; `depth` is None where the task has none."""

    task: str
    length: int
    depth: float | None
    accuracy: float
    bound: float  # that no weights with this decode state can exceed; 1 where none is known


@dc.dataclass(frozen=True)
class ContextReport:
    """The cells of all tasks."""

    cells: tuple[ContextCell, ...]
    threshold: float
    claimed: int | None  # the longest length that the model takes or was said to take

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks, in their order."""
        return tuple(dict.fromkeys(cell.task for cell in self.cells))

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths, ascending."""
        return tuple(sorted({cell.length for cell in self.cells}))

    def accuracy(self, task: str | None = None, length: int | None = None) -> float:
        """The mean accuracy of a task over depths, at one length or all; without a task, the mean of all."""
        tasks = self.tasks if task is None else (task,)
        lengths = self.lengths if length is None else (length,)
        means = [
            sum(some) / len(some)
            for task in tasks
            for length in lengths
            if (some := [cell.accuracy for cell in self.cells if (cell.task, cell.length) == (task, length)])
        ]
        return sum(means) / len(means)

    def used(self, task: str | None = None) -> int:
        """The longest length up to which a task's accuracy, or the mean of all tasks', reaches the threshold; 0: none."""
        longest = 0
        for length in self.lengths:
            if self.accuracy(task, length) < self.threshold:
                break
            longest = length
        return longest

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        return {
            "claimed_length": self.claimed,
            "used_length": self.used(),
            "accuracy": self.accuracy(),
            "threshold": self.threshold,
            "used": {task: self.used(task) for task in self.tasks},
            "cells": [dc.asdict(cell) for cell in self.cells],
        }


def measure_context(
    model: Transformer, design: ContextDesign, claimed: int | None = None, watch: Watch = lambda done, total, task: None
) -> ContextReport:
    """Answer the rows of every cell. `claimed` is the length that the model promises, by default that of its positions."""
    tokens, limit = ordinary_tokens(model, design.seed), longest_length(model.spec)
    if limit is not None and design.lengths[-1] > limit:
        raise UsageError(f"--lengths: {design.lengths[-1]} tokens; the limit of the model is {limit}")
    for task in design.tasks:  # before anything is computed
        for length in design.lengths:
            task.check_sizes(length, len(tokens))
    grid = [
        (task, length, depth)
        for task in design.tasks
        for length in design.lengths
        for depth in (design.depths if isinstance(task, AtDepth) else (None,))
    ]
    cells = list[ContextCell]()
    for task, length, depth in grid:
        name = data if isinstance(data := task.to_data(), str) else format_value(data)
        watch(len(cells), len(grid), name)
        at = dc.replace(task, depth=depth) if isinstance(task, AtDepth) else task
        key = data_sha256({"task": task.to_data(), "length": length, "seed": design.seed})  # the same rows at every depth
        batch = at.batch(int(key[:12], 16), design.rows, length, len(tokens))
        right, answers = hits(model, tokens[batch.tokens], _mapped(batch.labels, tokens), design.chunk)
        bound = state_bound(model.spec, task, length, len(tokens), model.dtype.itemsize)
        cells.append(ContextCell(name, length, depth, right / answers, bound))
    return ContextReport(tuple(cells), design.threshold, claimed or limit)


def ordinary_tokens(model: Transformer, seed: int) -> Tensor:
    """The ids that tasks are written in: with a tokenizer all but special tokens, in an order drawn from the seed, since tasks
    read a meaning into the order; without one, those of the vocabulary as they are, which the model may have learned."""
    vocabulary = model.vocabulary
    if vocabulary is None or (tokenizer := vocabulary.tokenizer) is None:
        return torch.arange(model.spec.vocab)
    special = tokenizer.special_ids() | vocabulary.stop
    ids = torch.tensor([i for i in range(min(tokenizer.size, model.spec.vocab)) if i not in special])
    return ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))]


def hits(model: Transformer, ids: Tensor, labels: Tensor, chunk: int = PIECE) -> tuple[int, int]:
    """How many labels (rows, n) are the most probable token after ids (rows, n), and how many there are."""
    wanted = labels != IGNORED
    first = int(wanted.any(0).long().argmax())
    found = probable_tokens(model, ids, first, chunk).to(labels.device)
    return int((found == labels[:, first:]).sum()), int(wanted.sum())


def _mapped(labels: Tensor, tokens: Tensor) -> Tensor:
    return torch.where(labels == IGNORED, IGNORED, tokens[labels.clamp_min(0)])


# -- loss by position


@dc.dataclass(frozen=True)
class LossBand:
    """The mean loss of the tokens at positions first … last of a text, counted from 1: the first token has no loss."""

    first: int
    last: int
    loss: float


def loss_by_position(model: Transformer, path: Path, length: int, rows: int) -> tuple[LossBand, ...]:
    """Return the loss in bands of doubling positions, over up to `rows` texts of `length` tokens at even offsets of a file."""
    tokenizer = None if model.vocabulary is None else model.vocabulary.tokenizer
    ids = corpus_for([model.spec], path, tokenizer, length, "give the file to the model it was tokenized for").train
    starts = torch.linspace(0, len(ids) - length, min(rows, len(ids) // length), dtype=torch.float64).long()
    losses = torch.cat([token_losses(model, ids[None, start : start + length]) for start in starts.tolist()]).mean(0)
    edges = [2**i for i in range(1, (length - 1).bit_length())]
    bands = zip([1, *edges], [*edges, length - 1], strict=True)
    return tuple(LossBand(a + 1, b + 1, losses[a - 1 : b].mean().item()) for a, b in ((a + (a > 1), b) for a, b in bands))


# -- what a state can hold


def state_bound(spec: Model, task: SyntheticTask, length: int, vocab: int, itemsize: int) -> float:
    """The accuracy that no weights of this architecture can exceed on a task, from the bits of its decode state; 1 where the
    task does not say what must be carried."""
    carried = task.carried(length, vocab)
    if carried is None:
        return 1.0
    tokens, answers, choices = carried
    dtype = {2: "bf16", 4: "fp32", 8: "fp64"}[itemsize]
    return accuracy_bound(8 * Account(spec, length, dtype).state_bytes(tokens) / answers, choices)


def accuracy_bound(bits: float, choices: int) -> float:
    """The largest accuracy on uniform answers of `choices` that `bits` per answer allow, by Fano's inequality."""
    if choices < 2 or bits >= math.log2(choices):
        return 1.0

    def needed(accuracy: float) -> float:
        wrong = 1 - accuracy
        entropy = -sum(p * math.log2(p) for p in (accuracy, wrong) if p > 0)
        return math.log2(choices) - entropy - wrong * math.log2(choices - 1)

    low, high = 1 / choices, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if needed(middle) <= bits else (low, middle)
    return high


def read_context(data: Mapping[str, Any]) -> ContextDesign:
    """The design in a mapping, as in lab.yaml."""
    known = [field.name for field in dc.fields(ContextDesign)]
    hints = get_type_hints(ContextDesign)
    for name, value in data.items():
        if name not in known:
            raise UsageError(f"probe.{name}: is not a key; keys: {', '.join(known)}")
        if name != "tasks" and (problem := type_problem(value, hints[name])) is not None:
            raise UsageError(f"probe.{name}: {problem}")
    tasks = data.get("tasks", ())
    fields = {name: value for name, value in data.items() if name != "tasks"}
    return ContextDesign.read([tasks] if isinstance(tasks, str) else tasks, **fields)
