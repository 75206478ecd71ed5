"""The recurrent encoder–decoder of 2014: with one vector between its halves, and with additive attention.

    encoder   h_j = GRU(x_j, h_{j−1})                               both: the decoder starts from s_0 = tanh(W h_n)
    decoder   s_i = GRU(y_{i−1}, s_{i−1})                           only with attention:
    e_ij = uᵀ tanh(W_q s_i + W_k h_j)     α_i = softmax(e_i)        c_i = Σ_j α_ij h_j is added to s_i

The tasks are to copy a random sequence and to reverse it. One vector has the same size for every length, so the accuracy of the
model without attention falls with the length and the gap between both grows (Cho et al. 2014; Bahdanau et al. 2014). The
alignment α of the trained model is a diagonal for the copy and an anti-diagonal for the reversal. A whole sequence is exact
where every next token is predicted from the right tokens before it: then greedy decoding writes the same sequence.

    python recipes/seq2seq_2014.py [--seeds 3] [--quick] [--out seq2seq_2014]  three minutes on two cores; seconds with --quick
    python recipes/seq2seq_2014.py --quick --fault uniform                     tested with α_ij = 1/n: the alignment is lost
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

    width: int = 64
    symbols: int = 16
    lengths: tuple[int, int] = (2, 12)  # of the training sequences: the shortest, the longest
    tested: tuple[int, ...] = (4, 6, 8, 10, 12)
    steps: int = 360
    batch: int = 96
    lr: float = 0.006
    tasks: tuple[str, ...] = ("copy", "reverse")


QUICK = Setup(symbols=8, lengths=(2, 8), tested=(2, 4, 8), steps=200, tasks=("copy",))
MODELS = {"with attention": "cross: additive_attention, ", "without": ""}
COLORS = {"with attention": "#2f5fb3", "without": "#d9822b"}
START = 0  # the first input of the decoder; the symbols follow
ALIGNMENT = "layers.0.cross.pattern"


def build(setup: Setup, cross: str, seed: int) -> dt.Transformer:
    """The two models differ in one part of the decoder."""
    size = f"width: {setup.width}, vocab: {setup.symbols + 1}, init: fan_in"
    encoder = f"{{{size}, head: null, layers: [{{mixer: gru, ffn: null}}]}}"
    decoder = f"[{{mixer: {{kind: gru, from_encoder: true}}, {cross}ffn: null}}]"
    return dt.build(
        dt.from_yaml(f"{{{size}, head: {{kind: lm, tied: false}}, encoder: {encoder}, layers: {decoder}}}"), seed=seed
    )


def rows(setup: Setup, task: str, count: int, length: int, draw: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Sources, inputs of the decoder, and targets, each (count, length)."""
    source = torch.randint(1, setup.symbols + 1, (count, length), generator=draw)
    target = source.flip(1) if task == "reverse" else source
    return source, torch.cat([torch.full((count, 1), START), target[:, :-1]], 1), target


def train(setup: Setup, task: str, name: str, seed: int) -> dt.Transformer:
    """A model trained on batches of one random length each."""
    model, draw = build(setup, MODELS[name], seed), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), setup.lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, 2 * (1 - step / setup.steps)))
    for step in range(setup.steps):
        length = int(torch.randint(setup.lengths[0], setup.lengths[1] + 1, (1,), generator=draw))
        source, inputs, target = rows(setup, task, setup.batch, length, draw)
        loss = model.loss(inputs, target, source=source)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"  {task}, {name}, seed {seed}, step {step}: loss {loss.detach():.3f}", file=sys.stderr, flush=True)
    return model


def accuracy(
    setup: Setup, model: dt.Transformer, task: str, length: int, seed: int, patch: dict[str, Any]
) -> tuple[float, float]:
    """The fraction of tokens that are right, and that of whole sequences."""
    source, inputs, target = rows(setup, task, 256, length, torch.Generator().manual_seed(10**6 + seed))
    right = model.trace(inputs, "head.logits", source=source, patch=patch)["head.logits"].argmax(-1) == target
    return float(right.float().mean()), float(right.all(1).float().mean())


def alignment(setup: Setup, model: dt.Transformer, task: str, seed: int, patch: dict[str, Any]) -> tuple[Tensor, float]:
    """α (n, m) of one sequence of the longest length, and the correlation of the source position that each output attends to,
    Σ_j j α_ij, with its own, the mean of 64 sequences."""
    source, inputs, _ = rows(setup, task, 64, setup.tested[-1], torch.Generator().manual_seed(2 * 10**6 + seed))
    weights = model.trace(inputs, ALIGNMENT, source=source, patch=patch)[ALIGNMENT][:, 0]
    place = torch.arange(source.shape[1], dtype=weights.dtype)
    attended, own = weights @ place, place - place.mean()
    attended = attended - attended.mean(1, keepdim=True)
    return weights[0], float(((attended @ own) / (attended.norm(dim=1) * own.norm()).clamp_min(1e-6)).mean())


Figures = dict[str, tuple[float, float | None, float | None]]


def experiment(setup: Setup, seed: int, fault: str | None) -> tuple[Figures, Any]:
    """Train both models on both tasks, and compare them by length."""
    figures, curves, drawn = Figures(), dict[str, dict[str, list[float]]](), dict[str, Tensor]()
    for task in setup.tasks:
        curves[task] = {}
        for name, cross in MODELS.items():
            patch = {ALIGNMENT: lambda x: torch.full_like(x, 1 / x.shape[-1])} if cross and fault == "uniform" else {}
            model = train(setup, task, name, seed)
            both = [accuracy(setup, model, task, length, seed, patch) for length in setup.tested]
            curves[task][name] = [tokens for tokens, _ in both]
            lowest, some, most = (0.85, 0.3, None) if cross else (None, None, 0.15)
            figures[f"{task} {name}: accuracy per token, longest"] = (both[-1][0], lowest, None)
            figures[f"{task} {name}: whole sequences, longest"] = (both[-1][1], some, most)
            if cross:
                drawn[task], slope = alignment(setup, model, task, seed, patch)
                low, high = (0.85, None) if task == "copy" else (None, -0.85)
                figures[f"{task}: correlation of the alignment with the position"] = (slope, low, high)
        gaps = [a - b for a, b in zip(*(curves[task][name] for name in MODELS), strict=True)]
        figures[f"{task}: gap at the longest − at the shortest"] = (gaps[-1] - gaps[0], 0.15, None)
    return figures, (setup.tested, curves, drawn)


def draw(figure, runs: list[Any]) -> None:
    """Draw the accuracy by length of all seeds, and the alignments of the first."""
    tasks = list(runs[0][1])
    axes = figure.subplots(1, 2 * len(tasks), width_ratios=[3] * len(tasks) + [2] * len(tasks))
    for panel, task in zip(axes, tasks, strict=False):
        for lengths, curves, _ in runs:
            for name, values in curves[task].items():
                label = name if curves is runs[0][1] else None
                panel.plot(lengths, values, color=COLORS[name], marker="o", ms=3, lw=1.3, label=label)
        panel.set(xlabel="length", ylabel="accuracy per token", title=task, ylim=(0, 1.03), xticks=runs[0][0])
        panel.legend(frameon=False, loc="lower left")
    for panel, task in zip(axes[len(tasks) :], tasks, strict=True):
        panel.imshow(runs[0][2][task], cmap="Blues", vmin=0, vmax=1)
        panel.set(xlabel="source", ylabel="output", title=f"alignment, {task}")


RECIPE = dt.Recipe(
    experiment, draw, full=Setup(), quick=QUICK, faults={"uniform": "copy with attention: accuracy per token, longest"}
)

if __name__ == "__main__":
    sys.exit(RECIPE.main())
