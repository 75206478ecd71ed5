"""Merging: the weights of two fine-tunes of one base are averaged, and the mean keeps both tasks.

    w = ½ (w_A + w_B)          w_A = base + what task A changed,  w_B = base + what task B changed

A base learns two tasks from noisy answers: copy a sequence, or reverse it, named by a token. One fine-tune sees only clean
copies, the other only clean reversals; each gets better at its task, until it has forgotten the other (a loss of 1.5). Both lie
near the base, where the loss is nearly convex, so the mean of their weights is good at both tasks (Wortsman et al. 2022)
without one further step of training. The same mean of fine-tunes of two different bases is useless: equal functions can have
different weights.

    python recipes/merge.py [--seeds 3] [--quick] [--out merge]
    python recipes/merge.py --quick --fault strangers               the two fine-tunes have different bases
"""

from __future__ import annotations

import copy
import dataclasses as dc
import sys
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import dovetail as dt


@dc.dataclass(frozen=True)
class Setup:
    """The sizes of the experiment."""

    vocab: int = 6
    length: int = 4
    width: int = 32
    steps: int = 500  # of the base
    tuning: int = 400  # steps at most: a fine-tune ends where it has forgotten the other task
    forgotten: float = 1.5  # loss, in nats per token
    noise: float = 0.2  # the fraction of random answers that the base sees
    batch: int = 64
    lr: float = 0.01
    tuning_lr: float = 0.004


QUICK = Setup(steps=350)
TASKS = ("copy", "reverse")
Figures = dict[str, tuple[float, float | None, float | None]]  # name -> value, lowest and highest that hold


def rows(setup: Setup, task: str, count: int, draw: torch.Generator, noise: float = 0.0) -> tuple[Tensor, Tensor]:
    """A sequence, the token of the task, the answer; and the next token where it belongs to the answer, else −100."""
    x = torch.randint(setup.vocab, (count, setup.length), generator=draw)
    answer = x if task == "copy" else x.flip(1)
    wrong = torch.randint(setup.vocab, x.shape, generator=draw)
    answer = torch.where(torch.rand(x.shape, generator=draw) < noise, wrong, answer)
    ids = torch.cat([x, torch.full((count, 1), setup.vocab + TASKS.index(task)), answer], 1)
    targets = torch.cat([torch.full((count, setup.length), -100), answer, torch.full((count, 1), -100)], 1)
    return ids, targets


@torch.no_grad()
def measure(setup: Setup, model: dt.Transformer, task: str) -> tuple[float, float]:
    """Accuracy and loss of a task, on clean rows that no training has seen."""
    ids, targets = rows(setup, task, 512, torch.Generator().manual_seed(10**6))
    known = targets != -100
    logits = model(ids)[known]
    return float((logits.argmax(-1) == targets[known]).float().mean()), float(cross_entropy(logits, targets[known]))


def train(setup: Setup, model: dt.Transformer, seed: int) -> None:
    """Train a model on noisy rows of both tasks."""
    draw = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), setup.lr, betas=(0.9, 0.99), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, setup.lr, total_steps=setup.steps, pct_start=0.1)
    for step in range(setup.steps):
        batches = [rows(setup, task, setup.batch // 2, draw, setup.noise) for task in TASKS]
        loss = model.loss(*(torch.cat(part) for part in zip(*batches, strict=True)))
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 49:
            print(f"  base: step {step + 1}, loss {loss.item():.3f}", file=sys.stderr, flush=True)


def tune(setup: Setup, model: dt.Transformer, task: str, seed: int) -> None:
    """Tune a model on clean rows of one task until it has forgotten the other."""
    draw, (other,) = torch.Generator().manual_seed(seed), {*TASKS} - {task}
    optimizer = torch.optim.AdamW(model.parameters(), setup.tuning_lr, betas=(0.9, 0.99), weight_decay=0.01)
    for step in range(setup.tuning):
        if step % 5 == 0 and measure(setup, model, other)[1] >= setup.forgotten:
            print(f"  {task}: {other} is forgotten after {step} steps", file=sys.stderr, flush=True)
            return
        model.loss(*rows(setup, task, setup.batch, draw)).backward()
        optimizer.step()
        optimizer.zero_grad()


def base_of(setup: Setup, seed: int) -> dt.Transformer:
    """A model that has learned both tasks from noisy answers."""
    spec = dt.from_yaml(
        f"{{width: {setup.width}, vocab: {setup.vocab + 2}, init: {{kind: normal, spread: 0.1}},"
        " layers: [{repeat: 2, mixer: {heads: 4}, ffn: {hidden: 64}}]}"
    )
    model = dt.build(spec, seed=seed)
    train(setup, model, seed)
    return model


def mixed(a: dt.Transformer, b: dt.Transformer, share: float) -> dt.Transformer:
    """A model with the weights (1 − share) · a + share · b."""
    model, other = copy.deepcopy(a), b.state_dict()
    model.load_state_dict({name: torch.lerp(weight, other[name], share) for name, weight in a.state_dict().items()})
    return model


def experiment(setup: Setup, seed: int, fault: str | None) -> tuple[Figures, Any]:
    """Train base and fine-tunes of a seed and average them; the figures with their goals, and the losses on the line."""
    base = base_of(setup, seed)
    bases = {"copy": base, "reverse": base_of(setup, seed + 1000) if fault == "strangers" else base}
    tuned = {task: copy.deepcopy(model) for task, model in bases.items()}
    for task, model in tuned.items():
        tune(setup, model, task, seed + 1)
    shares = torch.linspace(0, 1, 11).tolist()
    line = [[measure(setup, mixed(*tuned.values(), share), task) for task in TASKS] for share in shares]
    of_base = [measure(setup, base, task) for task in TASKS]
    mean, ends = line[5], (line[0], line[-1])
    others = [ends[0][1], ends[1][0]]  # of each fine-tune, the task that it did not see
    figures: Figures = {
        "loss of the base, worse of both tasks": (max(loss for _, loss in of_base), None, None),
        "loss of each fine-tune on its task, worse": (max(ends[0][0][1], ends[1][1][1]), None, 0.1),
        "loss of a fine-tune on the other task, worse of both": (max(loss for _, loss in others), 1.0, None),
        "loss of the mean, worse of both tasks": (max(loss for _, loss in mean), None, None),
        "the same ÷ loss of the base": (max(loss for _, loss in mean) / max(loss for _, loss in of_base), None, 0.8),
        "the same ÷ loss of a fine-tune on the other task": (
            max(loss for _, loss in mean) / max(loss for _, loss in others),
            None,
            0.3,
        ),
        "accuracy of the mean, worse of both tasks": (min(hits for hits, _ in mean), 0.9, None),
        "accuracy of a fine-tune on the other task, worse of both": (min(hits for hits, _ in others), None, 0.85),
    }
    return figures, {"shares": shares, "line": line, "base": of_base}


def draw(figure: Any, runs: list[Any]) -> None:
    """The loss of both tasks on the line between the two fine-tunes, of every seed, and that of the base."""
    axes = figure.subplots()
    for i, (task, color) in enumerate(zip(TASKS, ("#2f5fb3", "#d9822b"), strict=True)):
        for run in runs:
            label = task if run is runs[0] else None
            axes.plot(run["shares"], [point[i][1] for point in run["line"]], color=color, label=label, lw=1.4)
    base = sum(loss for run in runs for _, loss in run["base"]) / (2 * len(runs))
    axes.axhline(base, color="#8a90a0", ls="--", lw=1, label="the base")
    axes.set(xlabel="← tuned on copies        share        tuned on reversals →", ylabel="loss, nats per token", yscale="log")
    axes.legend(frameon=False)


RECIPE = dt.Recipe(
    experiment,
    draw,
    full=Setup(),
    quick=QUICK,
    faults={"strangers": "accuracy of the mean, worse of both tasks"},
    size=(6, 4),
)

if __name__ == "__main__":
    sys.exit(RECIPE.main())
