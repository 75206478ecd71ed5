"""What is said of LoRA, tried on a small model: which matrices, which learning rate, which rank, which batch.

    W' = W + α / r · B A          A (r, inp) random, B (out, r) zero at the start, only they are trained (Hu et al. 2021)

Schulman et al. 2025 ("LoRA without regret") report of large models that adapters belong on all linear layers, that their
best learning rate is about ten times that of full fine-tuning, that rank 1 suffices for policy gradients, and that large
batches hurt them more. Here a base knows a random map of its tokens, g₁(x), and learns another one, g₂(x):

1. rank 6 on attention against rank 2 on all linear layers: 2,304 trained numbers each, each at its best learning rate;
2. the best learning rate of full fine-tuning and of rank 8, and both with batches of 16 and of 128. These figures have no goal:
   a factor of ten does not show at this size (one third in the quick form, on two rates). A likely reason: the best rate of
   full fine-tuning falls with the width of a model, that of LoRA does not, and the width is 24.

Policy gradients with rank 1 are not tried here.

    python recipes/lora_evidence.py [--seeds 3] [--quick] [--out lora_evidence]
    python recipes/lora_evidence.py --quick --fault swapped         the names of "all" and "attention" are swapped
"""

from __future__ import annotations

import copy
import dataclasses as dc
import math
import sys
from typing import Any

import torch
from torch import Tensor

import dovetail as dt


@dc.dataclass(frozen=True)
class Setup:
    """The sizes of the experiment."""

    vocab: int = 48
    length: int = 16
    batch: int = 16
    large: int = 128
    base_steps: int = 150
    steps: int = 100
    rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
    measure_batches: bool = True


QUICK = Setup(steps=50, base_steps=80, rates=(1e-2, 3e-2), measure_batches=False)
ATTENTION = {"kind": "lora", "rank": 6, "targets": ["mixer.*"]}
ALL = {"kind": "lora", "rank": 2}
Figures = dict[str, tuple[float, float | None, float | None]]  # name -> value, lowest and highest that hold


def say(text: str, last: bool = True) -> None:
    """Show progress on one line of stderr."""
    print(f"  {text:60}", end="\n" if last else "\r", file=sys.stderr, flush=True)


def supervised(setup: Setup, model: dt.Transformer, mapping: Tensor, rate: float, seed: int, steps: int, batch: int) -> float:
    """Train the weights that take a gradient to predict g(x); the mean loss of the last ten steps."""
    draw = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam([weight for weight in model.parameters() if weight.requires_grad], rate)
    losses: list[float] = []
    for _ in range(steps):
        ids = torch.randint(setup.vocab, (batch, setup.length), generator=draw)
        loss = model.loss(ids, mapping[ids])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return sum(losses[-10:]) / 10


def adapted(base: dt.Transformer, kind: dict[str, Any] | None, seed: int) -> tuple[dt.Transformer, int]:
    """A copy of the base with an adapter, or to be trained as a whole; and how many numbers are trained."""
    model = copy.deepcopy(base)
    count = sum(w.numel() for w in model.parameters()) if kind is None else dt.attach(model, kind, seed=seed).parameters
    return model, count


def experiment(setup: Setup, seed: int, fault: str | None) -> tuple[Figures, Any]:
    """Train the base and every variant; the figures with their goals, and the losses by learning rate."""
    torch.manual_seed(seed)
    first, second = torch.randint(setup.vocab, (2, setup.vocab))
    base = dt.build(
        f"{{width: 24, vocab: {setup.vocab}, layers: [{{repeat: 2, mixer: {{heads: 2, kv_heads: 2}}, ffn: {{hidden: 104}}}}]}}",
        seed=seed,
    )
    known = supervised(setup, base, first, 1e-2, seed, setup.base_steps, setup.batch)
    say(f"base: loss {known:.3f}")

    def sweep(name: str, kind: dict[str, Any] | None, batch: int) -> tuple[dict[float, float], int]:
        losses, count = {}, 0
        for rate in setup.rates:
            model, count = adapted(base, kind, seed)
            losses[rate] = supervised(setup, model, second, rate, seed + 1, setup.steps, batch)
            say(f"{name}, learning rate {rate:g}: loss {losses[rate]:.3f}", rate == setup.rates[-1])
        return losses, count

    kinds: dict[str, dict[str, Any] | None] = {"full": None, "rank 8": {"kind": "lora", "rank": 8}}
    kinds |= {"all": ATTENTION, "attention": ALL} if fault == "swapped" else {"all": ALL, "attention": ATTENTION}
    curves, counts = {}, {}
    for name, kind in kinds.items():
        curves[name], counts[name] = sweep(name, kind, setup.batch)
    best = {name: min(losses.values()) for name, losses in curves.items()}
    rate = {name: min(losses, key=losses.__getitem__) for name, losses in curves.items()}

    figures: Figures = {
        "loss of the base on its own map": (known, None, 0.3),
        "trained numbers, all ÷ attention": (counts["all"] / counts["attention"], 1.0, 1.0),
        "loss, all linear layers ÷ attention only": (best["all"] / best["attention"], None, 0.7),
        "best learning rate, rank 8 ÷ full": (rate["rank 8"] / rate["full"], None, None),
    }
    if setup.measure_batches:
        for batch in (setup.batch, setup.large):
            lora = (
                best["rank 8"]
                if batch == setup.batch
                else min(sweep("rank 8, large batch", kinds["rank 8"], batch)[0].values())
            )
            full = best["full"] if batch == setup.batch else min(sweep("full, large batch", None, batch)[0].values())
            figures[f"loss, rank 8 − full, batches of {batch}"] = (lora - full, None, None)
    return figures, curves


def draw(figure: Any, runs: list[Any]) -> None:
    """Loss by learning rate, of every seed."""
    axes = figure.subplots()
    colors = {"full": "#8a90a0", "rank 8": "#3a8f5c", "all": "#2f5fb3", "attention": "#d9822b"}
    names = {
        "full": "all weights",
        "rank 8": "all linear, rank 8",
        "all": "all linear, rank 2",
        "attention": "attention, rank 6",
    }
    for name, color in colors.items():
        for run in runs:
            points = [(rate, loss) for rate, loss in run[name].items() if math.isfinite(loss)]
            label = names[name] if run is runs[0] else None
            axes.plot(*zip(*points, strict=True), "o-", color=color, label=label, lw=1.3, ms=3)
    axes.set(xscale="log", yscale="log", xlabel="learning rate", ylabel="loss, nats per token", title="a new map")
    axes.legend(frameon=False)


RECIPE = dt.Recipe(
    experiment,
    draw,
    full=Setup(),
    quick=QUICK,
    faults={"swapped": "loss, all linear layers ÷ attention only"},
    size=(6.5, 4),
)

if __name__ == "__main__":
    sys.exit(RECIPE.main())
