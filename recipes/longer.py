"""Longer contexts: RoPE is scaled, and the model is trained on for a few steps at the new length.

    angle(p, i) = p · base^(−2i/d)          trained on p < 24; at p = 95 a query and a key meet at angles never seen
    scaled by 4: a larger base              high frequencies stay, the lowest is divided by 4 (NTK-aware scaling)

The task is induction: a random sequence repeats, and each token of a repeat follows from an earlier occurrence, so that one
answer can be found at any length, if attention still finds it. The loss is measured on the last quarter of 96 positions, and
compared with that of the last quarter of 24. After scaling, a short training repairs what is left. Training on at the old
length does not, and the recipe also measures what training on does without scaling.

    python recipes/longer.py [--seeds 3] [--quick] [--out longer]
    python recipes/longer.py --quick --fault short                 trained on at the old length: the loss stays
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

    vocab: int = 24
    width: int = 32
    heads: int = 4
    length: int = 24
    factor: int = 4
    steps: int = 500  # at most, at the old length: training ends soon after the model has learned it
    more: int = 80  # at the new length
    batch: int = 64
    lr: float = 0.01


QUICK = Setup(heads=2, steps=300, more=80)
Figures = dict[str, tuple[float, float | None, float | None]]  # name -> value, lowest and highest that hold


def rows(setup: Setup, count: int, length: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random sequences that repeat with a period of 4 to 10, and the next token where it can be known, else −100."""
    periods = torch.randint(4, 11, (count, 1), generator=draw)
    sequence = torch.rand(count, setup.vocab, generator=draw).argsort(-1)
    place = torch.arange(length)
    ids = sequence.gather(1, place % periods)
    targets = torch.where(place >= periods, ids.roll(-1, 1), -100)
    targets[:, -1] = -100
    return ids, targets


@torch.no_grad()
def by_position(model: dt.Transformer, data: tuple[Tensor, Tensor]) -> Tensor:
    """(n,) the mean loss of the knowable next tokens at each position; not a number where there is none."""
    ids, targets = data
    losses = cross_entropy(model(ids).flatten(0, 1), targets.flatten(), reduction="none").view(ids.shape)
    return losses.sum(0) / (targets != -100).sum(0)


def last_quarter(losses: Tensor) -> float:
    """The mean of the last quarter of positions but the last one, which predicts nothing."""
    return float(losses[-(len(losses) // 4) : -1].mean())


def train(setup: Setup, model: dt.Transformer, length: int, steps: int, lr: float, draw: torch.Generator, name: str) -> int:
    """Train a model at this length, with equally many tokens per step; return the steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr, betas=(0.9, 0.99), weight_decay=0.01)
    test = rows(setup, 128, setup.length, torch.Generator().manual_seed(10**6))
    for step in range(1, steps + 1):
        model.loss(*rows(setup, setup.batch * setup.length // length, length, draw)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == steps:
            loss = last_quarter(by_position(model, test))
            done = step == steps or (name == "training" and loss < 0.02)
            end = "\n" if done else "\r"
            print(f"  {name}: step {step}, loss at the old length {loss:.3f}", end=end, file=sys.stderr, flush=True)
            if done:
                return step
    return steps


def experiment(setup: Setup, seed: int, fault: str | None) -> tuple[Figures, Any]:
    """Train, scale, train on; the figures with their goals, and the loss by position."""
    draw, far = torch.Generator().manual_seed(seed), setup.factor * setup.length
    spec = dt.from_yaml(
        f"{{width: {setup.width}, vocab: {setup.vocab}, init: {{kind: normal, spread: 0.15}}, head: {{kind: lm, tied: false}},"
        f" layers: [{{repeat: 2, mixer: {{heads: {setup.heads}}}, ffn: null}}]}}"
    )
    model = dt.build(spec, seed=seed)
    steps = train(setup, model, setup.length, setup.steps, setup.lr, draw, "training")
    test = rows(setup, 256, far, torch.Generator().manual_seed(2 * 10**6 + seed))
    short = rows(setup, 256, setup.length, torch.Generator().manual_seed(2 * 10**6 + seed))
    old = last_quarter(by_position(model, short))
    curves = {"trained at 24": by_position(model, test)}

    plain = copy.deepcopy(model)
    scaled = dt.graft(model, set={"layers.*.mixer.position.scaling": {"kind": "ntk", "factor": setup.factor}}).model
    curves["scaled"] = by_position(scaled, test)
    length = setup.length if fault == "short" else far
    for name, net in (("scaled, trained on", scaled), ("trained on without scaling", plain)):
        train(setup, net, length, setup.more, setup.lr / 2, draw, name)
        curves[name] = by_position(net, test)
    end = {name: last_quarter(losses) for name, losses in curves.items()}
    figures: Figures = {
        "loss at the old length": (old, None, 0.1),
        "loss at four times the length": (end["trained at 24"], 0.5, None),
        "the same, scaled": (end["scaled"], None, None),
        "the same, scaled and trained on": (end["scaled, trained on"], None, 0.1),
        "scaled and trained on, minus the loss at the old length": (end["scaled, trained on"] - old, None, 0.05),
        "tokens of the new length ÷ of the training": (setup.more / steps, None, 0.8),
        "loss, trained on without scaling": (end["trained on without scaling"], None, None),
    }
    return figures, curves


def draw(figure: Any, runs: list[Any]) -> None:
    """The loss by position of the four models, the mean of all seeds."""
    axes = figure.subplots()
    colors = ("#8a90a0", "#a34fa3", "#2f5fb3", "#d9822b")
    for name, color in zip(runs[0], colors, strict=True):
        losses = torch.stack([run[name] for run in runs]).mean(0)
        axes.plot(range(4, len(losses) - 1), losses[4:-1], color=color, label=name, lw=1.4)
    axes.axvline(23.5, color="#8a90a0", lw=1, ls=":")
    axes.set(xlabel="position (dotted: the trained length)", ylabel="loss, nats per token", yscale="log")
    axes.legend(frameon=False)


RECIPE = dt.Recipe(
    experiment, draw, full=Setup(), quick=QUICK, faults={"short": "the same, scaled and trained on"}, size=(7, 4)
)

if __name__ == "__main__":
    sys.exit(RECIPE.main())
