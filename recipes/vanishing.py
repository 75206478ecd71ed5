"""Vanishing and exploding gradients: how much of the gradient of the last token reaches a token that is d earlier.

    h_t = tanh(W x_t + U h_{t−1})        ∂h_t/∂h_{t−d} = Π diag(1 − h²) U        d factors: the norm is about exp(λ d)
    RNN    λ < 0 where U contracts (vanishes), λ = log g where U is g times a rotation and h is small (explodes for g > 1)
    LSTM   c_t = f ∘ c_{t−1} + i ∘ …: the factor is f; an open forget gate (f = 1) carries a value and its gradient unchanged
    attention   one step from any token to any other: the norm does not depend on d

Each model is one layer without a feed-forward. The gradient of a random direction of the last logits is taken at the embedding
of each token; `exponent` is the slope of log₁₀ of its norm against d, in powers of ten per token. Then the consequences: which
model learns to recall a token from d earlier, and an RNN that explodes, trained with its gradient clipped and without
(Bengio et al. 1994; Hochreiter & Schmidhuber 1997; Pascanu et al. 2013).

    python recipes/vanishing.py [--seeds 3] [--quick] [--out vanishing]       a minute on two cores; seconds with --quick
    python recipes/vanishing.py --quick --fault closed                        the forget gate closed: its goals fail
    python recipes/vanishing.py --quick --fault unclipped                     nothing is clipped: training diverges
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

    width: int = 32
    vocab: int = 12
    length: int = 96  # of the sequences whose gradients are measured
    fitted: tuple[int, int] = (8, 80)  # the distances that an exponent is fitted to
    distance: int = 12  # of the token to recall
    steps: int = 200
    explosive: tuple[int, int] = (30, 60)  # tokens and steps of the RNN that explodes


QUICK = Setup(length=64, fitted=(8, 48), distance=10, steps=120, explosive=(30, 30))
MIXERS = {"RNN": "rnn", "LSTM": "lstm", "attention": "{kind: attention, heads: 4}"}
COLORS = {"RNN": "#d9822b", "LSTM": "#2f5fb3", "LSTM, forget gate open": "#7aa6e8", "attention": "#8a90a0"}
OPEN = 16.0  # a logit: σ(16) = 0.9999999
GAINS = (0.8, 1.0, 1.25)


def build(setup: Setup, kind: str, seed: int, dtype: str = "float32") -> dt.Transformer:
    """A model of one layer, which is only its mixer."""
    layers = f"[{{mixer: {MIXERS[kind]}, ffn: null}}]"
    yaml = f"{{width: {setup.width}, vocab: {setup.vocab}, init: fan_in, head: {{kind: lm, tied: false}}, layers: {layers}}}"
    return dt.build(dt.from_yaml(yaml), seed=seed, dtype=dtype)


def set_gate(model: dt.Transformer, setup: Setup, logit: float) -> None:
    """Set the bias of the forget gate, the second of the four of an LSTM."""
    with torch.no_grad():
        model.layers[0].mixer.x.bias[setup.width : 2 * setup.width] = logit


def set_gain(model: dt.Transformer, gain: float, inputs: float, seed: int) -> None:
    """Make U of an RNN `gain` times a rotation, and scale its inputs: where h is small, tanh is the identity."""
    mixer = model.layers[0].mixer
    rotation = torch.empty_like(mixer.u[0])
    with torch.no_grad():
        mixer.u[0] = gain * torch.nn.init.orthogonal_(rotation, generator=torch.Generator().manual_seed(seed))
        mixer.x.weight.mul_(inputs)


def gradient_norms(model: dt.Transformer, setup: Setup, seed: int) -> Tensor:
    """(length,) log₁₀ of the gradient norm at the embedding of the token at distance 0, 1, 2 …, the mean of 8 rows."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(setup.vocab, (8, setup.length), generator=draw)
    run = model.trace(ids, "embedded", "head.logits", grad=True)
    direction = torch.randn(8, setup.vocab, generator=draw, dtype=torch.float64)
    (run["head.logits"][:, -1] * direction).sum().backward()
    gradient = run["embedded"].grad
    assert gradient is not None
    return gradient.norm(dim=-1).log10().mean(0).flip(0)


def exponent(norms: Tensor, setup: Setup, over: str = "distance") -> tuple[float, float]:
    """The slope of log₁₀ of the norm over the distance (an exponential) or its logarithm (a power law), and R² of the line."""
    x = torch.arange(*setup.fitted, dtype=torch.float64)
    x, y = (x if over == "distance" else x.log10()), norms[slice(*setup.fitted)]
    slope = ((x - x.mean()) * (y - y.mean())).mean() / x.var(correction=0)
    residual = y - y.mean() - slope * (x - x.mean())
    return float(slope), float(1 - residual.var() / y.var())


def carried(setup: Setup, seed: int, gate: float) -> float:
    """The largest change of an LSTM's state h after the first token, relative to h: its gates are patched so that only the
    first token is written, and the forget gate has this logit."""
    model, width = build(setup, "LSTM", seed, "float64"), setup.width
    ids = torch.randint(setup.vocab, (8, setup.length), generator=torch.Generator().manual_seed(seed))
    patch = {
        f"layers.0.mixer.x[channel=0:{width}, pos=1:]": -2 * OPEN,  # the input gate
        f"layers.0.mixer.x[channel={width}:{2 * width}]": gate,
        f"layers.0.mixer.x[channel={3 * width}:{4 * width}]": 2 * OPEN,  # the output gate
    }
    h = dt.look.trace(model, ids, "layers.0.mixer.h", patch=patch)["layers.0.mixer.h"]
    return float((h - h[:, :1]).norm(dim=-1).max() / h[:, 0].norm(dim=-1).mean())


def rows(setup: Setup, count: int, distance: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """A first token of four, noise, and a last token that asks for the first."""
    ids = torch.randint(4, setup.vocab - 1, (count, distance + 1), generator=draw)
    ids[:, 0], ids[:, -1] = torch.randint(4, (count,), generator=draw), setup.vocab - 1
    targets = torch.full_like(ids, -100)
    targets[:, -1] = ids[:, 0]
    return ids, targets


def recall(setup: Setup, kind: str, seed: int) -> float:
    """The accuracy on fresh rows after training."""
    model, draw = build(setup, kind, seed), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for step in range(setup.steps):
        loss = model.loss(*rows(setup, 32, setup.distance, draw))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 0:
            print(f"  recall, {kind}, step {step}: loss {loss.detach():.3f}", end="\r", file=sys.stderr, flush=True)
    ids, targets = rows(setup, 512, setup.distance, torch.Generator().manual_seed(10**6 + seed))
    with torch.no_grad():
        return float((model(ids)[:, -1].argmax(-1) == targets[:, -1]).float().mean())


def explode(setup: Setup, seed: int, largest: float) -> list[float]:
    """The losses of an RNN with U = 2 × a rotation, on 8 fixed rows, by plain gradient descent with clipped gradients."""
    tokens, steps = setup.explosive
    model, losses = build(setup, "RNN", seed), list[float]()
    set_gain(model, 2.0, 1.0, seed)
    optimizer = torch.optim.SGD(model.parameters(), 2.0)
    ids, targets = rows(setup, 8, tokens, torch.Generator().manual_seed(seed))
    for _ in range(steps):
        loss = model.loss(ids, targets)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), largest)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


Figures = dict[str, tuple[float, float | None, float | None]]


def experiment(setup: Setup, seed: int, fault: str | None) -> tuple[Figures, Any]:
    """Measure the exponents, train the models that recall and the RNN that explodes."""
    gate = -2.0 if fault == "closed" else OPEN
    curves = {kind: gradient_norms(build(setup, kind, seed, "float64"), setup, seed) for kind in MIXERS}
    model = build(setup, "LSTM", seed, "float64")
    set_gate(model, setup, gate)
    curves["LSTM, forget gate open"] = gradient_norms(model, setup, seed)
    slopes = {kind: exponent(curve, setup)[0] for kind, curve in curves.items()}
    straight, bent = exponent(curves["RNN"], setup)[1], exponent(curves["RNN"], setup, "its logarithm")[1]
    figures: Figures = {
        "exponent: RNN": (slopes["RNN"], None, -0.12),
        "exponent: LSTM": (slopes["LSTM"], -0.1, -0.04),
        "exponent: LSTM, forget gate open": (slopes["LSTM, forget gate open"], -0.03, 0.03),
        "exponent: attention": (slopes["attention"], -0.01, 0.01),
        "RNN, R² of an exponential": (straight, 0.99, None),
        "RNN, R² of an exponential − of a power law": (straight - bent, 0.03, None),
        "change of a value behind an open forget gate": (carried(setup, seed, gate), None, 1e-3),
    }
    for gain in GAINS:
        model = build(setup, "RNN", seed, "float64")
        set_gain(model, gain, 1e-12, seed)
        error = exponent(gradient_norms(model, setup, seed), setup)[0] - math.log10(gain)
        figures[f"exponent − log₁₀ g: RNN with U = {gain} × a rotation"] = (error, -0.005, 0.005)
    for kind, (low, high) in {"RNN": (None, 0.75), "LSTM": (0.9, None), "attention": (0.9, None)}.items():
        figures[f"accuracy of recall at distance {setup.distance}: {kind}"] = (recall(setup, kind, seed), low, high)
    clipped = explode(setup, seed, math.inf if fault == "unclipped" else 0.3)
    free = explode(setup, seed, math.inf)
    figures["last loss, clipped"] = (clipped[-1], None, 0.05)
    figures["log₁₀ of the largest loss, not clipped"] = (math.log10(max(filter(math.isfinite, free))), 2.0, None)
    return figures, (curves, slopes, clipped, free)


def draw(figure, runs: list[Any]) -> None:
    """Draw the gradient norms of all seeds against the distance, and the losses of the RNN that explodes."""
    reach, explosion = figure.subplots(1, 2, width_ratios=(3, 2))
    for curves, slopes, clipped, free in runs:
        first = curves is runs[0][0]
        for kind, curve in curves.items():
            label = f"{kind}: 10^({slopes[kind]:.3f} d)" if first else None
            reach.plot(curve - curve[1], color=COLORS[kind], lw=1.3, label=label)
        explosion.semilogy(free, color="#d9822b", lw=1.3, label="not clipped" if first else None)
        explosion.semilogy(clipped, color="#2f5fb3", lw=1.3, label="clipped to norm 0.3" if first else None)
    reach.set(xlabel="distance d, tokens", ylabel="log₁₀ (gradient norm ÷ at d = 1)", title="the gradient that reaches a token")
    explosion.set(xlabel="step", ylabel="loss", title="an RNN with U = 2 × a rotation", ylim=(1e-4, 1e6))
    for axes in (reach, explosion):
        axes.legend(frameon=False)


FAULTS = {"closed": "change of a value behind an open forget gate", "unclipped": "last loss, clipped"}
RECIPE = dt.Recipe(experiment, draw, full=Setup(), quick=QUICK, faults=FAULTS, size=(11, 4))

if __name__ == "__main__":
    sys.exit(RECIPE.main())
