"""Pruning: remove the heads and the layer that matter least, then train a little to heal.

    importance of a head     how much the log-probability of the answers falls when its output is replaced by 0
    importance of a layer    the same, when it returns what it read
    prune                    rows and columns of the least important heads leave the weights (Michel et al. 2019)
    heal                     a few steps of training on the smaller model

The task is induction: a random sequence repeats, and the model predicts the tokens of the repeat. Few of its heads do the work,
and the sweep finds them: without half of the heads, picked by importance, the model still answers; without as many that
matter most it fails. With one head per layer, or one layer less, what is lost heals in fewer steps than training took.

    python recipes/prune.py [--seeds 3] [--quick] [--out prune]
    python recipes/prune.py --quick --fault reversed               removes the heads that matter most
"""

from __future__ import annotations

import dataclasses as dc
import sys
from typing import Any

import torch
from torch import Tensor

import dovetail as dt


@dc.dataclass(frozen=True)
class Setup:
    """The sizes of the experiment."""

    vocab: int = 24
    width: int = 32
    heads: int = 4
    layers: int = 3
    length: int = 24
    steps: int = 800  # at most: training ends soon after the model has learned it
    heal: int = 150
    batch: int = 64
    lr: float = 0.01


QUICK = Setup(steps=400, heal=100)
Figures = dict[str, tuple[float, float | None, float | None]]  # name -> value, lowest and highest that hold


def rows(setup: Setup, count: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random sequences that repeat with a period of 4 to 10, and the next token where it can be known, else −100."""
    periods = torch.randint(4, 11, (count, 1), generator=draw)
    sequence = torch.rand(count, setup.vocab, generator=draw).argsort(-1)
    place = torch.arange(setup.length)
    ids = sequence.gather(1, place % periods)
    targets = torch.where(place >= periods, ids.roll(-1, 1), -100)
    targets[:, -1] = -100
    return ids, targets


@torch.no_grad()
def accuracy(model: dt.Transformer, ids: Tensor, targets: Tensor) -> float:
    """The fraction of knowable next tokens that the model predicts."""
    known = targets != -100
    return float((model(ids).argmax(-1) == targets)[known].float().mean())


def train(setup: Setup, model: dt.Transformer, steps: int, lr: float, draw: torch.Generator, test, name: str) -> list[float]:
    """Train the model until it has learned the task, or for as many steps; the accuracy of every tenth step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr, betas=(0.9, 0.99), weight_decay=0.01)
    curve: list[float] = []
    for step in range(steps + 1):
        if step % 10 == 0:
            curve.append(accuracy(model, *test))
            done = step == steps or min(curve[-5:]) >= 0.99
            end = "\n" if done else "\r"
            print(f"  {name}: step {step}, accuracy {curve[-1]:.3f}", end=end, file=sys.stderr, flush=True)
            if done:
                break
        model.loss(*rows(setup, setup.batch, draw)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return curve


def log_prob(targets: Tensor):
    """A metric of sweeps: per row, the mean log-probability of the knowable next tokens."""

    def metric(logits: Tensor) -> Tensor:
        repeated = targets.repeat(len(logits) // len(targets), 1)  # a sweep has one copy of the rows per intervention
        known = repeated != -100
        picked = logits.log_softmax(-1).gather(-1, repeated.clamp_min(0)[..., None])[..., 0]
        return (picked * known).sum(-1) / known.sum(-1)

    return metric


def by_layer(order: list[int], heads: int) -> dict[int, list[int]]:
    """Layer → heads, of numbers that count all heads of the model; every layer keeps one."""
    removed: dict[int, list[int]] = {}
    for number in order:
        if len(removed.get(number // heads, [])) < heads - 1:
            removed.setdefault(number // heads, []).append(number % heads)
    return removed


def experiment(setup: Setup, seed: int, fault: str | None) -> tuple[Figures, Any]:
    """Train, measure importance, prune and heal; the figures with their goals, and what the picture shows."""
    draw = torch.Generator().manual_seed(seed)
    test = rows(setup, 128, torch.Generator().manual_seed(10**6 + seed))
    probe = rows(setup, 128, torch.Generator().manual_seed(2 * 10**6 + seed))  # importance is measured on other rows
    spec = dt.from_yaml(
        f"{{width: {setup.width}, vocab: {setup.vocab}, init: {{kind: normal, spread: 0.15}}, head: {{kind: lm, tied: false}},"
        f" layers: [{{repeat: {setup.layers}, mixer: {{heads: {setup.heads}}}, ffn: null}}]}}"
    )
    model = dt.build(spec, seed=seed)
    curve = train(setup, model, setup.steps, setup.lr, draw, test, "training")
    metric = log_prob(probe[1])
    _, effects = dt.look.ablate(model, probe[0], "layers.*.mixer.z[head]", metric).table()
    importance = -effects.flatten()  # (layers · heads,)
    order = importance.argsort().tolist()
    half = len(order) // 2
    least, most = by_layer(order[:half], setup.heads), by_layer(order[::-1][:half], setup.heads)
    if fault == "reversed":
        least = most
    before = accuracy(model, *test)
    pruned, crippled = dt.prune_heads(model, least), dt.prune_heads(model, most)
    after = accuracy(pruned, *test)
    single = dt.prune_heads(model, by_layer(order, setup.heads))  # every layer keeps its most important head
    after_single = accuracy(single, *test)
    healing = train(setup, single, setup.heal, setup.lr, draw, test, "healing, one head per layer")

    layers = -dt.look.skip_layers(model, probe[0], metric).table()[1].flatten()
    drop = int(layers.argmin())
    shallow = dt.graft(model, layers=[i for i in range(setup.layers) if i != drop]).model
    after_layer = accuracy(shallow, *test)
    healing_layer = train(setup, shallow, setup.heal, setup.lr, draw, test, "healing, one layer less")
    count = [sum(weight.numel() for weight in net.parameters()) for net in (model, single, shallow)]
    figures: Figures = {
        "accuracy": (before, 0.95, None),
        "heads removed ÷ all": (sum(map(len, least.values())) / len(order), 0.4, 0.5),
        "accuracy without the heads that matter least": (after, 0.6, None),
        "accuracy without as many that matter most": (accuracy(crippled, *test), None, 0.4),
        "accuracy with one head per layer": (after_single, None, None),
        "the same, healed": (healing[-1], 0.9, None),
        "parameters left, one head per layer": (count[1] / count[0], None, 0.75),
        "accuracy without the layer that matters least": (after_layer, None, None),
        "accuracy without it, healed": (healing_layer[-1], 0.9, None),
        "parameters left, layer": (count[2] / count[0], None, 0.75),
        "steps of healing ÷ of training, one head per layer": ((len(healing) - 1) / (len(curve) - 1), None, 0.6),
    }
    shown = {"importance": importance.view(-1, setup.heads), "least": least, "curve": curve}
    return figures, {**shown, "heads healed": healing, "layer healed": healing_layer}


def draw(figure: Any, runs: list[Any]) -> None:
    """The importance of every head of the first seed, and accuracy while training and healing, of all seeds."""
    bars, curves = figure.subplots(1, 2, width_ratios=(1.3, 1))
    importance, least = runs[0]["importance"], runs[0]["least"]
    names = [(layer, head) for layer in range(len(importance)) for head in range(importance.shape[1])]
    colors = ["#8a90a0" if head in least.get(layer, []) else "#2f5fb3" for layer, head in names]
    bars.bar([f"{layer}.{head}" for layer, head in names], importance.flatten(), color=colors)
    bars.set(xlabel="layer.head (grey: removed)", ylabel="log p lost, nats", title="importance of each head, seed 0")
    for name, color, label in (
        ("curve", "#8a90a0", "training"),
        ("heads healed", "#2f5fb3", "healing, one head per layer"),
        ("layer healed", "#d9822b", "healing, one layer less"),
    ):
        for run in runs:
            steps = range(0, 10 * len(run[name]), 10)
            curves.plot(steps, run[name], color=color, lw=1.3, label=label if run is runs[0] else None)
    curves.set(xlabel="step", ylabel="accuracy", ylim=(0, 1.02), title="training and healing")
    curves.legend(frameon=False, loc="lower right")


RECIPE = dt.Recipe(
    experiment,
    draw,
    full=Setup(),
    quick=QUICK,
    faults={"reversed": "accuracy without the heads that matter least"},
    size=(11, 4),
)

if __name__ == "__main__":
    sys.exit(RECIPE.main())
