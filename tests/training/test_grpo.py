"""GRPO: advantages, the clipped ratio, rollouts that are a function of (seed, step), and a ratio of 1 without recomputing."""

from __future__ import annotations

import copy
import dataclasses as dc
from pathlib import Path

import numpy as np
import pytest
import torch
from tuning_base import base, write_rows

import dovetail as dt
from dovetail.base.errors import UsageError
from dovetail.proof.laws.invariant import ULPS
from dovetail.training.grpo import Grpo, advantages
from dovetail.training.objective import Setup, TuningData, context
from dovetail.training.plan import Plan
from dovetail.training.ranks import JobRanks
from dovetail.training.rollout import roll_out
from dovetail.training.source import BatchShape, HeldOut
from dovetail.training.step import Trainer, computing_in

OPTIONS = {"reward": "digit_sum", "group": 4, "max_tokens": 6}
RUN = {"method": "grpo", **OPTIONS, "batch": 8, "length": 32, "quiet": True, "learning_rate": 1e-3}


def sums(path: Path) -> Path:
    return write_rows(path, [{"prompt": f"What is {i}?", "answer": i} for i in range(30)])


def prepared(tmp_path: Path, **options: object):
    place = base(tmp_path / "base")
    model = dt.load(place)
    data = TuningData(model.vocabulary, "base", {**OPTIONS, **options})
    source = Grpo.read(sums(tmp_path / "x.jsonl"), model.spec, BatchShape(8, 32, 0), lambda _: None, data)
    objective, source = Grpo().prepare(source, Setup(model, None, 0, JobRanks(), torch.no_grad, dt.load))
    return model, objective, source


def test_advantages_are_relative_to_the_group():
    found = advantages(torch.tensor([1.0, 0.0, 0.0, 1.0, 2.0, 2.0, 2.0, 2.0]), 4)
    assert found[4:].tolist() == [0.0] * 4
    assert found[:4].sum().item() == pytest.approx(0.0, abs=1e-6)
    assert found[0].item() == pytest.approx(0.5 / (np.std([1, 0, 0, 1], ddof=1) + 1e-4), rel=1e-6)


def test_the_ratio_is_clipped_where_it_went_far_enough():
    policy = torch.tensor([[0.5, -0.5, 0.05]], dtype=torch.float64, requires_grad=True)
    for sign, moving in ((1.0, [False, True, True]), (-1.0, [True, False, True])):
        losses = Grpo(clip_ratio=0.2).token_losses(policy, torch.zeros(1, 3), torch.tensor([[sign]]), None)
        (gradient,) = torch.autograd.grad(losses.sum(), policy)
        assert (gradient[0] != 0).tolist() == moving
    same = Grpo(kl=0.3).token_losses(policy, policy.detach(), torch.tensor([[0.0]]), policy.detach())
    assert same.abs().max().item() == 0.0


def test_the_divergence_is_that_of_the_policy_from_the_first_weights():
    """p = 0.2 now and 0.5 at first: 0.5 / 0.2 − ln(0.5 / 0.2) − 1 = 0.583709; the other direction would be 0.316291."""
    policy, first = torch.tensor([[0.2]]).double().log(), torch.tensor([[0.5]]).double().log()
    losses = Grpo(kl=0.5).token_losses(policy, policy, torch.zeros(1, 1), first)
    assert losses.item() == pytest.approx(0.5 * 0.583709, abs=1e-6)


def test_the_ratio_of_the_sampler_is_one_within_the_bound_of_law_21(tmp_path):
    model, _, source = prepared(tmp_path)
    batch = source.batch(0)
    with torch.no_grad():
        policy = model.log_probs(batch.tokens, batch.labels, context(batch, 0, False), 1.0)
        largest = model(batch.tokens, context(batch, 0, False)).abs().max().item()
    wanted = batch.labels >= 0
    bound = 2 * ULPS * torch.finfo(torch.float32).eps * max(largest, 1.0)  # a log-prob is a difference of two logits
    apart = ((policy - batch.extra["old"])[wanted].exp() - 1).abs().max().item()
    assert wanted.sum() > 8
    assert apart <= bound
    assert (batch.extra["old"][wanted] < 0).all()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a7_the_divergence_of_the_first_step_is_0_in_every_precision(tmp_path, precision, micro_batches):
    """The reference was computed outside of the run's precision: in bfloat16 the divergence was not 0."""
    model = dt.load(base(tmp_path / "base")).train()
    data = TuningData(model.vocabulary, "base", OPTIONS)
    source = Grpo.read(sums(tmp_path / "x.jsonl"), model.spec, BatchShape(8, 32, 0), lambda _: None, data)
    setup = Setup(model, None, 0, JobRanks(), lambda: computing_in(model, precision, JobRanks()), dt.load)
    losses = []
    for kl in (0.0, 10.0):
        objective, prepared_source = Grpo(kl=kl).prepare(source, setup)
        plan = Plan(steps=1, precision=precision, micro_batches=micro_batches)
        trainer = Trainer(copy.deepcopy(model), objective, plan)
        losses.append(trainer.step(prepared_source.batch(0), 0, 0.0).loss)
    assert losses[0] == losses[1]
    with torch.no_grad(), setup.computing():
        next(objective.first.parameters()).mul_(1.1)
        piece = prepared_source.batch(0)
        assert objective(model, piece, 0, True).sum != dc.replace(objective, kl=0.0)(model, piece, 0, True).sum


def test_rollouts_are_a_function_of_seed_and_step_and_follow_the_probs(tmp_path):
    model, _, source = prepared(tmp_path)
    one, again, other = source.batch(3), source.batch(3), source.batch(4)
    assert torch.equal(one.tokens, again.tokens)
    assert not torch.equal(one.tokens, other.tokens)
    prompt = source.table.make.sampler.ids[0]
    first = [rollout.tokens[0] for rollout in roll_out(model, [prompt], 4000, 1, 1.0, (), 5)]
    probs = model(torch.tensor([prompt]))[0, -1].softmax(-1)
    found = torch.bincount(torch.tensor(first), minlength=len(probs)) / 4000
    assert (found - probs).abs().max().item() < 4 * (0.25 / 4000) ** 0.5  # four standard deviations
    greedy = roll_out(model, [prompt, prompt[:2]], 1, 6, 0.0, (), 5)
    assert greedy[0].tokens == model.generate(prompt, 6)
    assert greedy[1].tokens == model.generate(prompt[:2], 6)


def test_an_answer_is_the_same_whichever_others_have_ended(tmp_path):
    """Up to its end token, of any set of them, it is the answer without end tokens, and so are its log-probs."""
    model, _, source = prepared(tmp_path)
    prompts = source.table.make.sampler.ids[:3]
    whole = roll_out(model, prompts, 4, 8, 1.0, (), 7)
    for count in (1, 8, model.spec.vocab // 2):
        stop = range(count)
        some = roll_out(model, prompts, 4, 8, 1.0, stop, 7)
        for full, cut in zip(whole, some, strict=True):
            end = next((i for i, token in enumerate(full.tokens, 1) if token in stop), 8)
            assert cut.tokens == full.tokens[:end]
            assert cut.log_probs == pytest.approx(full.log_probs[:end], abs=1e-4)
    assert len({len(one.tokens) for one in some}) > 1


def test_a_killed_run_resumes_to_the_same_weights(tmp_path, monkeypatch):
    place, rows = base(tmp_path / "base"), sums(tmp_path / "x.jsonl")
    whole = dt.tune(place, rows, steps=4, out=tmp_path / "whole", **RUN)
    assert whole.history[0].train_metrics["reward"] >= 0
    batches = HeldOut.__getitem__

    def killed(self: HeldOut, i: int) -> object:
        if len((tmp_path / "cut/loss.jsonl").read_text().splitlines()) >= 2:
            raise KeyboardInterrupt
        return batches(self, i)

    monkeypatch.setattr(HeldOut, "__getitem__", killed)
    monkeypatch.setattr("dovetail.api.train.CHECKPOINT_MINUTES", 1e-9)
    with pytest.raises(KeyboardInterrupt):
        dt.tune(place, rows, steps=4, evals=4, out=tmp_path / "cut", **RUN)
    monkeypatch.undo()
    again = dt.tune(place, rows, steps=4, evals=4, out=tmp_path / "cut", **RUN)
    for (name, a), (_, b) in zip(whole.model.named_parameters(), again.model.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def yes(prompt: str, completion: str, row: object) -> float:
    return float("yes" in completion)


def test_rewards_are_registered_names_and_files_name_no_code(tmp_path):
    place, rows = base(tmp_path / "base"), sums(tmp_path / "x.jsonl")
    run = dt.tune(place, rows, steps=1, kl=0.1, **{**RUN, "reward": yes})
    assert "reward" in run.history[-1].val_metrics
    with pytest.raises(UsageError, match="unknown reward 'os:getcwd'"):
        dt.train(from_=place, chats=rows, objective="grpo", options={**OPTIONS, "reward": "os:getcwd"}, steps=1)
    with pytest.raises(UsageError, match="did you mean digit_sum"):
        dt.tune(place, rows, steps=1, **{**RUN, "reward": "digits_sum"})
    with pytest.raises(UsageError, match="group: 3 answers per prompt"):
        dt.tune(place, rows, steps=1, **{**RUN, "group": 3})
