"""Synthetic tasks: every label is what a plain program answers that reads the row, and no row of a task says something else."""

from __future__ import annotations

import dataclasses as dc
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail import parts
from dovetail.base.errors import SpecError
from dovetail.data.tasks.task import SyntheticTask, read_synthetic_task
from dovetail.nn.loss import IGNORED
from dovetail.spec.part import KINDS

Answers = dict[int, int]  # by position


def mqar(row: list[int], of: Any, vocab: int) -> Answers:
    half, table = (vocab - 1) // 2, dict(zip(row[0 : 2 * of.pairs : 2], row[1 : 2 * of.pairs : 2], strict=True))
    assert len(table) == of.pairs
    assert all(1 <= key <= half < value <= 2 * half for key, value in table.items())
    later = {i: token for i, token in enumerate(row) if i >= 2 * of.pairs and token != 0}
    assert sorted(later.values()) == sorted(table)  # every key once; the filler is none of them
    return {i: table[token] for i, token in later.items()}


def induction(row: list[int], of: Any, vocab: int) -> Answers:
    first, last = (i for i, token in enumerate(row) if token == 0)
    assert last == len(row) - 1
    return {last: row[first + 1]}


def selective_copy(row: list[int], of: Any, vocab: int) -> Answers:
    room = len(row) - of.symbols
    assert row[room:] == [1] * of.symbols
    symbols = [token for token in row[:room] if token != 0]
    assert all(token > 1 for token in symbols)
    return dict(enumerate(symbols, room))


def modular_sum(row: list[int], of: Any, vocab: int) -> Answers:
    answers = {i: sum(row[: i + 1]) % of.modulus for i in range(len(row))}
    return answers if of.every else {len(row) - 1: answers[len(row) - 1]}


def parity(row: list[int], of: Any, vocab: int) -> Answers:
    answers = {i: row[: i + 1].count(1) % 2 for i in range(len(row))}
    assert set(row) <= {0, 1}
    return answers if of.every else {len(row) - 1: answers[len(row) - 1]}


def dyck(row: list[int], of: Any, vocab: int) -> Answers:
    stack, answers = list[int](), Answers()
    for i, token in enumerate(row):
        if token < of.types:
            stack.append(token)
        else:
            assert stack.pop() == token - of.types
        assert len(stack) <= of.depth
        if stack:
            answers[i] = stack[-1] + of.types
    return answers


def sorting(row: list[int], of: Any, vocab: int) -> Answers:
    start = len(row) - of.items
    items = row[start - of.items : start]
    assert 0 not in items
    assert row[start:] == [0, *sorted(items)[:-1]]
    assert set(row[: start - of.items]) <= {0}
    return dict(enumerate(sorted(items), start))


def ranges(vocab: int) -> tuple[range, range, range]:
    third = (vocab - 1) // 3
    return range(1, third + 1), range(third + 1, 2 * third + 1), range(2 * third + 1, vocab)


def look_up(row: list[int], of: Any, vocab: int) -> Answers:
    keys, values, _ = ranges(vocab)
    chains, hops = {"needle": (1, 1), "multi_key": (getattr(of, "pairs", 0), 1)}.get(of.kind) or (of.chains, of.hops)
    table = {a: b for a, b in zip(row[:-2:2], row[1:-1:2], strict=False) if a in keys}
    assert len(table) == chains * hops
    assert sum(token in keys or token in values for token in row) == 2 * chains * hops + 1  # the rest is noise
    token = row[-1]
    for _ in range(hops):
        token = table[token]
    assert token in values
    return {len(row) - 1: token}


def variable_tracking(row: list[int], of: Any, vocab: int) -> Answers:
    keys, values, _ = ranges(vocab)
    held, order, start = dict[int, int](), list[int](), len(row) - of.hops
    for a, b in zip(row[:start:2], row[1:start:2], strict=False):
        if a in keys:
            held[a] = b if b in values else held[b]  # assigned before it is read
            order.append(a)
    assert len(order) == of.chains * of.hops
    answers = [name for name in order if held[name] == row[start]]
    assert row[start + 1 :] == answers[:-1]
    return dict(enumerate(answers, start))


def aggregation(row: list[int], of: Any, vocab: int) -> Answers:
    (most, first), (_, second), *_ = (counts := Counter(row[:-1])).most_common()
    assert len(counts) == of.words
    assert row[-1] == 0
    assert first >= 2 * second
    assert len({count for _, count in counts.most_common()[1:]}) == 1
    return {len(row) - 1: most}


def far_copy(row: list[int], of: Any, vocab: int) -> Answers:
    first, last = (i for i, token in enumerate(row) if token == 0)
    assert last == len(row) - of.span
    copied = row[first + 1 : first + 1 + of.span]
    assert row[last + 1 :] == copied[:-1]
    assert sum(token in ranges(vocab)[1] for token in row) == 2 * of.span - 1
    return dict(enumerate(copied, last))


CASES: list[tuple[str, dict[str, Any], Callable[[list[int], Any, int], Answers]]] = [
    ("mqar", {}, mqar),
    ("mqar", {"pairs": 3}, mqar),
    ("induction", {}, induction),
    ("selective_copy", {}, selective_copy),
    ("modular_sum", {}, modular_sum),
    ("modular_sum", {"modulus": 3, "every": False}, modular_sum),
    ("parity", {}, parity),
    ("parity", {"every": False}, parity),
    ("dyck", {}, dyck),
    ("dyck", {"types": 3, "depth": 2}, dyck),
    ("sorting", {}, sorting),
    ("needle", {}, look_up),
    ("multi_key", {}, look_up),
    ("multi_key", {"pairs": 4, "depth": 0.0}, look_up),
    ("multi_hop", {}, look_up),
    ("multi_hop", {"hops": 3, "chains": 2, "depth": 1.0}, look_up),
    ("variable_tracking", {}, variable_tracking),
    ("aggregation", {}, aggregation),
    ("far_copy", {}, far_copy),
]


def ours() -> set[str]:
    return {kind for kind, cls in KINDS.items() if issubclass(cls, SyntheticTask) and cls.__module__.startswith("dovetail.")}


def tasks() -> list[SyntheticTask]:
    return [read_synthetic_task({"kind": kind, **fields}) for kind, fields, _ in CASES]


@pytest.mark.parametrize(("kind", "fields", "answers"), CASES)
def test_labels_are_what_a_program_answers(kind: str, fields: dict[str, Any], answers: Any) -> None:
    task = read_synthetic_task({"kind": kind, **fields})
    for length in sorted({task.least_length(), task.least_length() + 1, 40}):
        vocab = max(task.least_vocab(), 32)
        batch = task.batch(7, 40, length, vocab)
        assert batch.tokens.shape == batch.labels.shape == (40, length)
        assert 0 <= int(batch.tokens.min()) <= int(batch.tokens.max()) < vocab
        for row, labels in zip(batch.tokens.tolist(), batch.labels.tolist(), strict=True):
            assert {i: label for i, label in enumerate(labels) if label != IGNORED} == answers(row, task, vocab)


def test_every_kind_is_tested() -> None:
    assert {case[0] for case in CASES} == ours()


@pytest.mark.parametrize("task", tasks(), ids=str)
def test_a_batch_is_a_function_of_its_seed(task: SyntheticTask) -> None:
    batch, again, other = (task.batch(seed, 8, 60, 64) for seed in (5, 5, 6))
    assert torch.equal(batch.tokens, again.tokens)
    assert torch.equal(batch.labels, again.labels)
    assert not torch.equal(batch.tokens, other.tokens)


@pytest.mark.parametrize("task", tasks(), ids=str)
def test_the_smallest_sizes_work_and_smaller_ones_are_refused(task: SyntheticTask) -> None:
    length, vocab = task.least_length(), task.least_vocab()
    batch = task.batch(0, 16, length, vocab)
    assert int(batch.tokens.max()) < vocab
    assert int((batch.labels != IGNORED).sum()) > 0
    with pytest.raises(SpecError, match=f"length: {length - 1}; the task .* needs at least {length}"):
        task.batch(0, 16, length - 1, vocab)
    with pytest.raises(SpecError, match=f"vocab: {vocab - 1}; the task .* needs at least {vocab}"):
        task.batch(0, 16, length, vocab - 1)


@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("kind", ["needle", "multi_key", "multi_hop", "far_copy"])
def test_depth_is_where_the_answer_stands(kind: str, depth: float) -> None:
    batch = read_synthetic_task({"kind": kind, "depth": depth}).batch(3, 12, 101, 97)
    answered = (batch.labels != IGNORED).long().argmax(1)
    values = batch.labels.gather(1, answered[:, None])
    for row, value, end in zip(batch.tokens.tolist(), values.flatten().tolist(), answered.tolist(), strict=True):
        last = end - {"far_copy": 8}.get(kind, 1)
        places = [i for i, token in enumerate(row[:end]) if token == value]
        assert min(abs(i - (1 + depth * (last - 1))) for i in places) <= 1


def test_unknown_kinds_and_fields_are_refused() -> None:
    with pytest.raises(SpecError, match=r"task: no part is called 'mqr'.*mqar"):
        read_synthetic_task("mqr")
    with pytest.raises(SpecError, match=r"task.pair: mqar has no such field.*pairs"):
        read_synthetic_task("{kind: mqar, pair: 3}")
    with pytest.raises(SpecError, match=r"pairs: 0 "):
        read_synthetic_task({"kind": "mqar", "pairs": 0})
    assert parts.Rope().kind == "rope"  # registered
    with pytest.raises(SpecError, match=r"rope is a position, not a task"):
        read_synthetic_task("rope")


def test_the_table_of_the_docs_has_every_task_with_its_fields() -> None:
    page = (Path(__file__).parents[2] / "docs" / "train.md").read_text(encoding="utf-8")
    table = page.split("## Synthetic tasks")[1].split("| task |")[1].split("\n\n")[0]
    cells = [row.split("|") for row in table.splitlines()[2:]]
    rows = {re.findall(r"`(\w+)`", row[1])[0]: set(re.findall(r"`(\w+)`", row[3])) for row in cells}
    assert rows == {kind: {field.name for field in dc.fields(KINDS[kind])} for kind in ours()}
