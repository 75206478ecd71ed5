"""Distillation: both divergences against their formulas in float64, value and gradient; positions without a label do not count;
a run comes closer to its teacher."""

from __future__ import annotations

import dataclasses as dc
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from tuning_base import base, chats

import dovetail as dt
from dovetail.base.errors import FileError, UsageError
from dovetail.nn.loss import IGNORED
from dovetail.training import tuning
from dovetail.training.objective import Setup, TuningData, context
from dovetail.training.ranks import JobRanks
from dovetail.training.source import BatchShape
from dovetail.training.tuning import Distill, Sft

TOL = 1e-9
RUN = {"method": "distill", "template": "plain", "length": 64, "batch": 4, "quiet": True, "learning_rate": 3e-3}
SMALLER = """
width: 16
vocab: 300
layers: [{mixer: {heads: 2, kv_heads: 2, head: 8}, ffn: {hidden: 24}}]
"""


def formula(student: Tensor, teacher: Tensor, direction: str, temperature: float) -> Tensor:
    """The divergence of each token, class by class, from the definition: Σ a (log a − log b) of two softmaxes."""
    rows: list[Tensor] = []
    for ours, theirs in zip(student, teacher, strict=True):
        weights = [(one / temperature - (one / temperature).max()).exp() for one in (ours, theirs)]
        p, q = (weight / weight.sum() for weight in weights)
        first, second = (q, p) if direction == "forward" else (p, q)
        rows.append(sum((a * (a.log() - b.log()) for a, b in zip(first, second, strict=True)), torch.zeros(())))
    return torch.stack(rows)


def gradient(student: Tensor, teacher: Tensor, direction: str, temperature: float) -> Tensor:
    """d/dz of the divergence, by hand: (p − q)/T forward, p (log p/q − KL)/T reverse."""
    p, q = ((one / temperature).softmax(-1) for one in (student, teacher))
    if direction == "forward":
        return (p - q) / temperature
    gap = p.log() - q.log()
    return p * (gap - (p * gap).sum(-1, keepdim=True)) / temperature


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_the_divergence_and_its_gradient_are_the_formula(direction: str, temperature: float) -> None:
    torch.manual_seed(0)
    student, teacher = (3 * torch.randn(5, 7, dtype=torch.float64) for _ in range(2))
    student.requires_grad_()
    found = Distill(direction=direction, temperature=temperature).divergence(student, teacher)
    torch.testing.assert_close(found, formula(student, teacher, direction, temperature), rtol=TOL, atol=TOL)
    (slope,) = torch.autograd.grad(found.sum(), student)
    torch.testing.assert_close(slope, gradient(student.detach(), teacher, direction, temperature), rtol=TOL, atol=TOL)
    assert (found > 0.1).all(), "the two differ"
    same = Distill(direction=direction, temperature=temperature).divergence(teacher, teacher)
    assert same.abs().max().item() == 0.0


def test_the_directions_weigh_by_the_teacher_and_by_the_student() -> None:
    """Two classes, p = (3/4, 1/4), q = (1/4, 3/4) at temperature 1: both are log 3 / 2; at q = (1/2, 1/2) they differ."""
    student, even = torch.tensor([[3.0, 1.0]]).double().log(), torch.zeros(1, 2, dtype=torch.float64)
    forward = Distill().divergence(student, even).item()
    reverse = Distill(direction="reverse").divergence(student, even).item()
    assert forward == pytest.approx(math.log(2 / 3**0.5), rel=1e-12)
    assert reverse == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5), rel=1e-12)


def prepared(tmp_path: Path, **settings: object):
    """A student, an objective with its teacher and a batch with padding, in float64."""
    student, other = dt.load(base(tmp_path / "student")).double(), base(tmp_path / "teacher", seed=7)
    data = TuningData(student.vocabulary, "student", {"template": "plain"})
    source = Sft.read(chats(tmp_path / "chats.jsonl"), student.spec, BatchShape(4, 64, 0), lambda _: None, data)
    setup = Setup(student, None, 0, JobRanks(), torch.no_grad, dt.load)
    objective, source = Distill(teacher=str(other), **settings).prepare(source, setup)
    return student, objective, source.batch(0)


@pytest.mark.quick(1)
@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_a_batch_is_the_sum_over_its_labeled_tokens(tmp_path: Path, monkeypatch, direction: str) -> None:
    student, objective, batch = prepared(tmp_path, direction=direction, temperature=2.0)
    monkeypatch.setattr(tuning, "CHUNK", 7)  # several chunks, the last not full
    found = objective(student, batch, 0, True)
    found.sum.backward()
    slopes = {name: weight.grad for name, weight in student.named_parameters()}
    student.zero_grad()
    wanted = batch.labels != IGNORED
    assert int(found.num_labels) == int(wanted.sum()) > 3 * 7
    logits, targets = (model(batch.tokens, context(batch, 0, False))[wanted] for model in (student, objective.model))
    whole = formula(logits, targets.detach(), direction, 2.0).sum()
    torch.testing.assert_close(found.sum, whole, rtol=TOL, atol=0)
    whole.backward()
    for name, weight in student.named_parameters():
        torch.testing.assert_close(
            slopes[name], weight.grad, rtol=1e-8, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
        )
    assert all(weight.grad is None and not weight.requires_grad for weight in objective.model.parameters())


@torch.no_grad()
def test_padding_and_tokens_without_a_label_have_no_effect(tmp_path: Path) -> None:
    student, objective, batch = prepared(tmp_path)
    found = objective(student, batch, 0, False)
    padding = ~batch.layout.real
    assert padding.any()
    filled = dc.replace(batch, tokens=torch.where(padding, 17, batch.tokens))
    assert torch.equal(objective(student, filled, 0, False).sum, found.sum)
    row, column = (int(one[0]) for one in (batch.labels != IGNORED).nonzero(as_tuple=True))
    fewer = dc.replace(batch, labels=batch.labels.index_put((torch.tensor(row), torch.tensor(column)), torch.tensor(IGNORED)))
    logits, targets = (model(batch.tokens, context(batch, 0, False))[row, column] for model in (student, objective.model))
    less = objective(student, fewer, 0, False)
    assert int(less.num_labels) == int(found.num_labels) - 1
    torch.testing.assert_close(found.sum - less.sum, objective.divergence(logits, targets), rtol=1e-8, atol=0)
    none = objective(student, dc.replace(batch, labels=torch.full_like(batch.labels, IGNORED)), 0, False)
    assert (float(none.sum), int(none.num_labels)) == (0.0, 0)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_a_run_comes_closer_to_its_teacher(tmp_path: Path, direction: str) -> None:
    teacher, student = base(tmp_path / "teacher", seed=7), base(tmp_path / "student", spec=SMALLER)
    data = chats(tmp_path / "chats.jsonl")
    run = dt.tune(student, data, teacher=teacher, direction=direction, steps=40, out=tmp_path / "run", **RUN)
    first, last = run.history[0].loss, run.history[-1].loss
    assert last < 0.8 * first, (first, last)
    assert run.held_out_loss < 0.9 * first
    assert dt.load(tmp_path / "run").spec.width == 16, "the student keeps its spec"


def test_the_teacher_is_named_and_has_the_same_tokens(tmp_path: Path) -> None:
    student, data = base(tmp_path / "student"), chats(tmp_path / "chats.jsonl")
    with pytest.raises(UsageError, match="teacher: give the directory of the model to learn from"):
        dt.tune(student, data, steps=1, **RUN)
    with pytest.raises(UsageError, match="direction: 'sideways' is none of its values"):
        dt.tune(student, data, steps=1, teacher=student, direction="sideways", **RUN)
    with pytest.raises(UsageError, match=r"temperature: 0\.0 is not above 0"):
        dt.tune(student, data, steps=1, teacher=student, temperature=0.0, **RUN)
    larger = base(tmp_path / "larger", spec=SMALLER.replace("300", "301"))
    with pytest.raises(FileError, match="its tokenizer or vocabulary is not the student's"):
        dt.tune(student, data, steps=1, teacher=larger, **RUN)


def test_a_teacher_of_itself_has_nothing_to_teach(tmp_path: Path) -> None:
    student, objective, batch = prepared(tmp_path)
    found = dc.replace(objective, model=student)(student, batch, 0, False)
    assert found.sum.abs().item() < 1e-12
