"""A generative adversarial network: a generator learns from a discriminator that tells its samples from data.

    D: real ~ p or generated ~ q?      V(D) = E_p[log D] + E_q[log(1 − D)]              (Goodfellow et al. 2014)
    best D for fixed p and q:          D*(x) = p(x) / (p(x) + q(x)),  V(D*) = 2·JSD(p, q) − log 4
    G against it:                      maximize E[log D(G(z))], the non-saturating loss

1. A known pair in one dimension, p = N(1, 1) and a mixture q: a trained D equals p / (p + q), and its value, by integration,
   2·JSD − log 4. With p in place of q, D is ½ everywhere.
2. Eight Gaussians on a ring. The generator takes steps of three times the size, so the discriminator does not keep up: for a D
   that stands still the best answer is a single point, and the generator collapses to one mode. The collapse is detected
   without labels of modes: by recall, the fraction of real points that have a generated point near them.
3. Two remedies bound the slope of D: a penalty on its gradient at real points (R1, Mescheder et al. 2018) and spectral norm
   of its weights (Miyato et al. 2018). With either, at the same learning rates, the generator covers every mode.

    python recipes/gan.py [--seeds 3] [--quick] [--out gan]
    python recipes/gan.py --quick --fault unpenalized           the weight of the penalty is 0: the modes collapse
    python recipes/gan.py --quick --fault shuffled              D's labels are shuffled: it learns ½ in place of p / (p + q)
"""

from __future__ import annotations

import dataclasses as dc
import itertools
import math
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

import dovetail as dt


@dc.dataclass(frozen=True)
class Setup:
    """The sizes of the experiment."""

    hidden: int = 48
    latent: int = 4
    batch: int = 64
    steps: int = 1200  # of generator and discriminator on the ring
    known_steps: int = 1000  # of the discriminator of the known pair
    known_batch: int = 512
    slow: float = 1e-3  # learning rate of the discriminator
    fast: float = 3e-3  # of the generator
    penalty: float = 3.0
    scale: float = 12.0  # with spectral norm every layer has slope 1, so the logits are multiplied


QUICK = Setup(steps=500, known_steps=300)
RING = 2 * torch.stack([f(torch.arange(8) * math.pi / 4) for f in (torch.cos, torch.sin)], 1)  # (8, 2)
Figures = dict[str, tuple[float, float | None, float | None]]  # name -> value, lowest and highest that hold


def mlp(sizes: list[int], act: nn.Module, norm: bool = False) -> nn.Sequential:
    """A multi-layer perceptron, with spectral norm of every weight if asked for."""
    layers: list[nn.Module] = []
    for inp, out in itertools.pairwise(sizes):
        linear = nn.Linear(inp, out)
        layers += [nn.utils.parametrizations.spectral_norm(linear) if norm else linear, act]
    return nn.Sequential(*layers[:-1])


# -- the known pair -------------------------------------------------------------------------------------------------

P = torch.distributions.Normal(1.0, 1.0)
Q = torch.distributions.MixtureSameFamily(
    torch.distributions.Categorical(torch.tensor([0.5, 0.5])),
    torch.distributions.Normal(torch.tensor([-2.0, 1.5]), torch.tensor([0.7, 0.5])),
)


def known_pair(setup: Setup, q: torch.distributions.Distribution, shuffled: bool) -> dict[str, Any]:
    """Train D on samples of p and q; its largest error and value beside those of D*, by integration."""
    model = mlp([1, setup.hidden, setup.hidden, 1], nn.Tanh())
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, setup.known_steps)
    label = torch.cat([torch.ones(setup.known_batch, 1), torch.zeros(setup.known_batch, 1)])
    for step in range(setup.known_steps):
        x = torch.cat([P.sample((setup.known_batch, 1)), q.sample((setup.known_batch, 1))])
        target = label[torch.randperm(len(label))] if shuffled else label
        loss = nn.functional.binary_cross_entropy_with_logits(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        say(f"known pair: step {step + 1}, loss {loss.item():.3f}", step, setup.known_steps)
    x = torch.linspace(-6, 6, 2401)
    dx = float(x[1] - x[0])
    with torch.no_grad():
        d = model(x[:, None])[:, 0].sigmoid()
    p, q_x = P.log_prob(x).exp(), q.log_prob(x).exp()
    best, mean = p / (p + q_x), (p + q_x) / 2
    value = float((p * d.log() + q_x * (1 - d).log()).sum() * dx)
    jsd = float((p * (p / mean).log() + q_x * (q_x / mean).log()).nan_to_num(0.0).sum() * dx / 2)
    error = float(((d - best).abs() * mean).sum() * dx)  # averaged over the samples that D sees
    return {"x": x, "D": d, "best": best, "error": error, "V": value, "bound": 2 * jsd - math.log(4)}


# -- the ring -------------------------------------------------------------------------------------------------------


def ring(count: int) -> Tensor:
    """Samples (count, 2) of eight narrow Gaussians on a circle of radius 2."""
    return RING[torch.randint(8, (count,))] + 0.05 * torch.randn(count, 2)


def train(setup: Setup, kind: str, penalty: float, seed: int) -> tuple[Tensor, float]:
    """Train both networks; 1,000 samples of the generator, and the accuracy of the discriminator on them and on data."""
    torch.manual_seed(seed)
    spectral, h = kind == "spectral norm", setup.hidden
    scale = setup.scale if spectral else 1.0
    discriminator = mlp([2, h, h, 1], nn.LeakyReLU(0.2), spectral)
    generator = mlp([setup.latent, h, h, 2], nn.ReLU())
    of_d = torch.optim.Adam(discriminator.parameters(), setup.slow, (0.5, 0.99))
    of_g = torch.optim.Adam(generator.parameters(), setup.fast, (0.5, 0.99))
    for step in range(setup.steps):
        real = ring(setup.batch).requires_grad_()
        fake = generator(torch.randn(setup.batch, setup.latent))
        score = scale * discriminator(real)
        loss = softplus(-score).mean() + softplus(scale * discriminator(fake.detach())).mean()  # −log D, −log(1 − D)
        if penalty:
            slope = torch.autograd.grad(score.sum(), real, create_graph=True)[0]
            loss = loss + penalty * slope.square().sum(1).mean()
        of_d.zero_grad()
        loss.backward()
        of_d.step()
        loss_g = softplus(-scale * discriminator(fake)).mean()  # non-saturating: −log D(G(z))
        of_g.zero_grad()
        loss_g.backward()
        of_g.step()
        say(f"{kind}: step {step + 1}, loss of D {loss.item():.3f}, of G {loss_g.item():.3f}", step, setup.steps)
    with torch.no_grad():
        samples = generator(torch.randn(1000, setup.latent))
        right = [discriminator(ring(1000)) > 0, discriminator(samples) < 0]
        return samples, float(torch.cat(right).float().mean())


def say(text: str, step: int, steps: int) -> None:
    """Show progress on one line of stderr."""
    if step % 50 == 49 or step + 1 == steps:
        print(f"  {text}", end="\n" if step + 1 == steps else "\r", file=sys.stderr, flush=True)


def modes(samples: Tensor) -> int:
    """How many of the eight modes have at least 1 % of the samples within 0.4: the labels are known here."""
    distance, mode = torch.cdist(samples, RING).min(1)
    return int((mode[distance < 0.4].bincount(minlength=8) >= 10).sum())


def recall(samples: Tensor, real: Tensor) -> float:
    """The fraction of real points with a generated one within the median distance to their 10th real neighbor, doubled: it
    needs no labels of modes (after Kynkäänniemi et al. 2019, with fixed balls)."""
    radius = 2 * torch.cdist(real, real).kthvalue(11).values.median() + 0.2
    return float((torch.cdist(real, samples).amin(1) < radius).float().mean())


def experiment(setup: Setup, seed: int, fault: str | None) -> tuple[Figures, Any]:
    """Train all networks of a seed; the figures with their goals, and what the picture shows."""
    torch.manual_seed(seed)
    known = known_pair(setup, Q, fault == "shuffled")
    equal = known_pair(setup, P, False)
    weight = 0.0 if fault == "unpenalized" else setup.penalty
    kinds = {"plain": 0.0, "gradient penalty": weight, "spectral norm": 0.0}
    trained = {kind: train(setup, kind, penalty, seed) for kind, penalty in kinds.items()}
    samples = {kind: points for kind, (points, _) in trained.items()}
    real = ring(1000)
    figures: Figures = {
        "mean |D − p / (p + q)|": (known["error"], None, 0.03),
        "V(D)": (known["V"], known["bound"] - 0.02, known["bound"] + 0.002),
        "2·JSD − log 4, the largest V": (known["bound"], None, None),
        "mean |D − ½| where p = q": (equal["error"], None, 0.03),
    }
    for kind, points in samples.items():
        covers = kind != "plain"
        figures[f"modes of 8, {kind}"] = (modes(points), 7 if covers else None, None if covers else 4)
        figures[f"recall, {kind}"] = (recall(points, real), 0.8 if covers else None, None if covers else 0.6)
        figures[f"accuracy of D, {kind}"] = (trained[kind][1], None, 0.8 if covers else None)
    return figures, {"known": known, "samples": samples, "real": real}


def draw(figure: Any, runs: list[Any]) -> None:
    """D beside D*, and the samples of the three generators, of the first seed."""
    run = runs[0]
    first, *others = figure.subplots(1, 4)
    first.plot(run["known"]["x"], run["known"]["best"], color="#8a90a0", lw=4, alpha=0.6, label="p / (p + q)")
    first.plot(run["known"]["x"], run["known"]["D"], color="#2f5fb3", label="trained D")
    first.set(xlabel="x", ylabel="D(x)", title="a known pair", xlim=(-4.5, 4.5))
    first.legend(frameon=False, loc="upper left")
    for axes, (kind, points) in zip(others, run["samples"].items(), strict=True):
        axes.scatter(*run["real"][:400].T, s=4, color="#8a90a0", label="data")
        axes.scatter(*points[:400].T, s=4, color="#d9822b", label="generated")
        axes.set(xlim=(-3, 3), ylim=(-3, 3), title=f"{kind}: {modes(points)} of 8 modes", aspect="equal")
    others[0].legend(frameon=False, loc="center", markerscale=3)


RECIPE = dt.Recipe(
    experiment,
    draw,
    full=Setup(),
    quick=QUICK,
    faults={"unpenalized": "modes of 8, gradient penalty", "shuffled": "mean |D − p / (p + q)|"},
)

if __name__ == "__main__":
    sys.exit(RECIPE.main())
