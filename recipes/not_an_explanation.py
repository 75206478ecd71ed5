"""Attention is not an explanation: other attention weights, far from those of the model, give the same prediction.

    text ─ embedding ─ GRU (→) ─ h_1 … h_n        z = Σ_j α_j h_j, read by the first token        class = argmax f(z)

The class of a text follows from one word, which is among its first tokens; the model learns it and attends somewhere. For each
text a search then looks for other weights: α̃ = softmax(θ) takes the place of α by a patch, and θ climbs on

    JSD(α, α̃) − 50 · max(0, TVD(f(α), f(α̃)) − ε/2)             JSD ≤ log 2 = 0.693: how far the weights are from each other
                                                                TVD ≤ ε = 0.01: how far the predictions are
It succeeds, because each state h_j of the GRU knows the words before it, so that many mixtures have the same z (Jain & Wallace
2019). It needs a search, as permuted weights change the prediction, and does not show that a model would compute the weights
that it finds (Wiegreffe & Pinter 2019). What a token does is measured by an intervention: replace it, and see what changes.

    python recipes/not_an_explanation.py [--seeds 3] [--quick] [--out not_an_explanation]     a minute; seconds with --quick
    python recipes/not_an_explanation.py --quick --fault permuted                             random weights, and no search
"""

from __future__ import annotations

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

    classes: int = 4
    cues: int = 3  # words per class
    others: int = 16  # words that say nothing
    length: int = 20
    earliest: int = 8  # the word of the class is among so many tokens
    width: int = 32
    steps: int = 300  # at most: training ends at a loss of 0.1
    texts: int = 64
    search: int = 300


QUICK = Setup(texts=16, search=100)
EPS = 0.01  # the change of the prediction that still counts as none
WEIGHTS = "layers.1.mixer.pattern[head=0, query=0]"
BLUE, ORANGE, GREY = "#2f5fb3", "#d9822b", "#8a90a0"


def build(setup: Setup, seed: int) -> dt.Transformer:
    """A GRU, Bahdanau attention of the first token to all, and a classifier that reads the first token."""
    spec = dt.from_yaml(f"""
width: {setup.width}
vocab: {1 + setup.classes * setup.cues + setup.others}
layers:
- {{mixer: gru, ffn: null}}
- {{mixer: {{kind: additive_attention, mask: full}}, ffn: null}}
head: {{kind: classifier, classes: {setup.classes}, pooling: first}}
""")
    return dt.build(spec, seed=seed)


def texts(setup: Setup, count: int, draw: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Ids (count, length) of words that say nothing but one; the class of that word; its position. The first token is 0."""
    first_other = 1 + setup.classes * setup.cues
    ids = torch.randint(first_other, first_other + setup.others, (count, setup.length), generator=draw)
    classes = torch.randint(setup.classes, (count,), generator=draw)
    position = torch.randint(1, 1 + setup.earliest, (count, 1), generator=draw)
    cue = 1 + setup.cues * classes[:, None] + torch.randint(setup.cues, (count, 1), generator=draw)
    ids = ids.scatter(1, position, cue)
    ids[:, 0] = 0
    return ids, classes, position[:, 0]


def train(setup: Setup, seed: int) -> dt.Transformer:
    """A model trained until its mean loss of ten steps is below 0.1."""
    model, draw, losses = build(setup, seed), torch.Generator().manual_seed(seed), list[float]()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    while len(losses) < setup.steps and (len(losses) < 10 or sum(losses[-10:]) >= 1.0):
        ids, classes, _ = texts(setup, 64, draw)
        loss = model.loss(ids, classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        if len(losses) % 20 == 0:
            print(f"  seed {seed}, step {len(losses)}: loss {losses[-1]:.3f}", file=sys.stderr, flush=True)
    return model.requires_grad_(False)


def predicted(model: dt.Transformer, ids: Tensor, weights: Tensor | None = None) -> Tensor:
    """The probs (texts, classes); with other weights (texts, length), through which gradients flow."""
    patch = {} if weights is None else {WEIGHTS: weights}
    grad = weights is not None and weights.requires_grad
    return model.trace(ids, "head.logits", patch=patch, grad=grad)["head.logits"].softmax(-1)


def jensen_shannon(p: Tensor, q: Tensor) -> Tensor:
    """The divergence of two distributions over the last axis, in nats: 0 if they are equal, log 2 if nothing overlaps."""
    mean = ((p + q) / 2).clamp_min(1e-12).log()
    return sum(((x * (x.clamp_min(1e-12).log() - mean)).sum(-1) for x in (p, q)), torch.zeros(())) / 2


def distance(p: Tensor, q: Tensor) -> Tensor:
    """The total variation distance of two distributions over the last axis."""
    return (p - q).abs().sum(-1) / 2


def search(model: dt.Transformer, ids: Tensor, weights: Tensor, steps: int, draw: torch.Generator) -> Tensor:
    """For each text the farthest weights that change its prediction by at most EPS; its own if there are none."""
    before, best = predicted(model, ids), weights.clone()
    theta = torch.randn(weights.shape, generator=draw).requires_grad_()
    optimizer = torch.optim.Adam([theta], 0.1)
    for step in range(steps):
        other = theta.softmax(-1)
        change, far = distance(predicted(model, ids, other), before), jensen_shannon(weights, other)
        better = (change <= EPS) & (far > jensen_shannon(weights, best))
        best = torch.where(better[:, None], other.detach(), best)
        optimizer.zero_grad()
        (50 * (change - EPS / 2).relu() - far).sum().backward()
        optimizer.step()
        if step % 20 == 0:
            print(
                f"  search, step {step}: JSD {jensen_shannon(weights, best).mean():.3f}", end="\r", file=sys.stderr, flush=True
            )
    return best


def effects(model: dt.Transformer, setup: Setup, ids: Tensor, draw: torch.Generator) -> Tensor:
    """(texts, length) how far the prediction changes if a token is replaced by a word that says nothing."""
    before, changes = predicted(model, ids), [torch.zeros(len(ids))]
    other = torch.randint(1 + setup.classes * setup.cues, 1 + setup.classes * setup.cues + setup.others, (1,), generator=draw)
    for position in range(1, setup.length):
        replaced = ids.clone()
        replaced[:, position] = other
        changes.append(distance(predicted(model, replaced), before))
    return torch.stack(changes, 1)


def fraction(holds: Tensor) -> float:
    """The fraction of texts for which it holds."""
    return float(holds.float().mean())


Figures = dict[str, tuple[float, float | None, float | None]]


def experiment(setup: Setup, seed: int, fault: str | None) -> tuple[Figures, Any]:
    """Train a model, search for other weights, and compare what weights and interventions point at."""
    model, draw = train(setup, seed), torch.Generator().manual_seed(10**6 + seed)
    ids, classes, position = texts(setup, setup.texts, draw)
    weights = model.trace(ids, WEIGHTS)[WEIGHTS][:, 0]  # (texts, length)
    permuted = weights.gather(1, torch.rand(weights.shape, generator=draw).argsort(-1))
    other = permuted if fault == "permuted" else search(model, ids, weights, setup.search, draw)
    before = predicted(model, ids)
    far, change = jensen_shannon(weights, other), distance(predicted(model, ids, other), before)
    moved = (weights.argmax(-1) != other.argmax(-1)) & (change <= EPS)
    effect = effects(model, setup, ids, draw)
    decided = effect.amax(-1) >= 0.1  # a class may be the prediction without any word, too
    named = effect.argmax(-1) == position
    figures: Figures = {
        "accuracy": (fraction(before.argmax(-1) == classes), 0.97, None),
        "JSD of other weights with the same prediction, mean (≤ 0.693)": (float(far.mean()), 0.15, None),
        "largest change of a prediction by other weights": (float(change.max()), None, EPS),
        "texts whose most attended token is another one": (fraction(moved), 0.6, None),
        "change of a prediction by permuted weights, mean": (
            float(distance(predicted(model, ids, permuted), before).mean()),
            0.05,
            None,
        ),
        "texts whose prediction one token changes": (fraction(decided), 0.4, None),
        "of those, it is the word of the class": (fraction(named[decided]), 0.97, None),
        "texts whose most attended token is the word of the class": (fraction(weights.argmax(-1) == position), None, None),
    }
    shown = int((far - 1.0 * (weights.amax(-1) < 0.25)).argmax())  # a text with a token that stands out
    return figures, (weights[shown], other[shown], int(position[shown]), far, weights, effect)


def draw(figure, runs: list[Any]) -> None:
    """Draw both weights of one text, all distances, and the attention to each token against its effect."""
    one, distances, both = figure.subplots(1, 3, width_ratios=(3, 2, 2))
    weights, other, position, *_ = runs[0]
    tokens = torch.arange(len(weights))
    one.bar(tokens - 0.2, weights, 0.4, color=BLUE, label="α of the model")
    one.bar(tokens + 0.2, other, 0.4, color=ORANGE, label="α̃, the same prediction")
    one.axvline(position, color=GREY, lw=0.8, ls="--", zorder=0, label="the word of the class")
    one.set(
        xlabel="token", ylabel="attention of the first token", title="one text", ylim=(0, 1.35), xticks=range(0, len(tokens), 2)
    )
    one.legend(frameon=False)
    distances.hist(torch.cat([run[3] for run in runs]), bins=14, range=(0, 0.7), color=BLUE)
    distances.axvline(math.log(2), color=GREY, lw=0.8, ls="--")
    distances.set(xlabel="JSD (α, α̃), nats", ylabel="texts", title="how far the other weights are")
    for *_, attended, effect in runs:
        both.scatter(attended, effect, s=5, color=BLUE, alpha=0.4)
    both.set(xlabel="attention", ylabel="change of the prediction", title="replacing one token", xlim=(0, 1))


FAULTS = {"permuted": "largest change of a prediction by other weights"}
RECIPE = dt.Recipe(experiment, draw, full=Setup(), quick=QUICK, faults=FAULTS)

if __name__ == "__main__":
    sys.exit(RECIPE.main())
