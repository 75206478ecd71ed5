"""A variational autoencoder: codes that follow a known distribution, so that a random code decodes to an image.

    x → encoder → μ, σ (8 each);   z = μ + σ·ε,  ε ~ N(0, 1);   z → decoder → x̂            (Kingma & Welling 2014)
    loss = −log p(x | z) + β·KL,   KL(N(μ, σ²) ‖ N(0, 1)) = ½ Σ (μ² + σ² − log σ² − 1)

By hand, at μ = 1.10 and σ = 0.52: ½ (1.21 + 0.2704 + 1.3079 − 1) = 0.894 nats in that dimension. The noise is drawn outside the
network (z = μ + σ·ε), so that gradients flow into μ and σ; their variance is far below that of the score-function estimator.
With β = 1 the loss is a bound on the likelihood: −loss = ELBO ≤ log p(x). A larger β stores less in the code, and copies worse
(Higgins et al. 2017); β = 0 is a plain autoencoder, whose random codes decode to garbage (`autoencoder.py`). Weighting several
codes of an image by their importance gives a tighter bound (Burda et al. 2016).

The images are the 1,797 handwritten digits of scikit-learn, 8 × 8, with values from 0 to 1.

    python recipes/vae.py [--seeds 3] [--quick] [--out vae]         pip install "dovetail-lm[plots,recipes]"
    python recipes/vae.py --quick --fault no_kl                     without the KL term samples are no digits
"""

from __future__ import annotations

import dataclasses as dc
import math
import sys
from typing import Any

import torch
from torch import Tensor, nn

import dovetail as dt


@dc.dataclass(frozen=True)
class Setup:
    """The sizes of the experiment."""

    code: int = 8
    hidden: int = 128
    steps: int = 2500
    batch: int = 64
    lr: float = 2e-3
    noise: float = 0.15  # standard deviation of p(x | z) per pixel
    draws: int = 200  # codes per image, of the importance-weighted bound


QUICK = Setup(hidden=96, steps=600, lr=4e-3, draws=100)
Figures = dict[str, tuple[float, float | None, float | None]]  # name -> value, lowest and highest that hold


def digits(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Images for training (1300, 64), 497 for the test, and the digits of these."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images, labels = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    return images[order[:1300]], images[order[1300:]], labels[order[1300:]]


def kl(mu: Tensor, log_var: Tensor) -> Tensor:
    """KL(N(μ, σ²) ‖ N(0, 1)) in nats, per dimension."""
    return 0.5 * (mu**2 + log_var.exp() - log_var - 1)


class VAE(nn.Module):
    """Encoder and decoder of one hidden layer."""

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        h, self.noise = setup.hidden, setup.noise
        self.encoder = nn.Sequential(nn.Linear(64, h), nn.GELU(), nn.Linear(h, 2 * setup.code))
        self.decoder = nn.Sequential(nn.Linear(setup.code, h), nn.GELU(), nn.Linear(h, 64))

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(rows, code) μ and log σ² of each image."""
        mu, log_var = self.encoder(x).chunk(2, -1)
        return mu, log_var

    def log_likelihood(self, x: Tensor, z: Tensor) -> Tensor:
        """log p(x | z) of each image: independent pixels with the same noise."""
        error = (self.decoder(z) - x).square().sum(-1) / (2 * self.noise**2)
        return -error - 32 * math.log(2 * math.pi * self.noise**2)  # 64 pixels, half of the logarithm each

    def loss(self, x: Tensor, beta: float) -> Tensor:
        """−log p(x | z) + β·KL with one code per image."""
        mu, log_var = self.encode(x)
        z = mu + (log_var / 2).exp() * torch.randn_like(mu)
        return (beta * kl(mu, log_var).sum(-1) - self.log_likelihood(x, z)).mean()

    @torch.no_grad()
    def bounds(self, x: Tensor, draws: int) -> tuple[float, float]:
        """Two lower bounds on the mean of log p(x): the ELBO, and the importance-weighted one."""
        mu, log_var = self.encode(x)
        noise = torch.randn(draws, *mu.shape)
        z = mu + (log_var / 2).exp() * noise
        log_prior, log_q = -0.5 * z.square().sum(-1), -0.5 * (noise.square() + log_var).sum(-1)  # 2π cancels
        weights = self.log_likelihood(x, z) + log_prior - log_q  # (draws, rows)
        return float(weights.mean()), float((weights.logsumexp(0) - math.log(draws)).mean())


def train(setup: Setup, images: Tensor, beta: float, seed: int) -> VAE:
    """A trained VAE."""
    torch.manual_seed(seed)
    model = VAE(setup)
    optimizer = torch.optim.Adam(model.parameters(), setup.lr)
    for step in range(setup.steps):
        loss = model.loss(images[torch.randint(len(images), (setup.batch,))], beta)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 99:
            end = "\n" if step + 1 == setup.steps else "\r"
            print(f"  β = {beta:g}: step {step + 1}, loss {loss.item():8.2f}", end=end, file=sys.stderr, flush=True)
    return model


def two_estimators(count: int) -> tuple[float, float]:
    """By sampling at μ = 1.10, σ = 0.52: the KL, and the standard deviation of the score-function gradient of E[z²] with
    respect to μ, relative to that of the reparameterized one."""
    mu, sigma = 1.10, 0.52
    noise = torch.randn(count, dtype=torch.float64)
    z = mu + sigma * noise
    divergence = (0.5 * z**2 - 0.5 * noise**2 - math.log(sigma)).mean()  # log q(z) − log p(z)
    score, reparameterized = z**2 * noise / sigma, 2 * z  # both have the mean 2μ
    return float(divergence), float(score.std() / reparameterized.std())


@torch.no_grad()
def nearest(images: Tensor, to: Tensor) -> float:
    """The mean distance of images to the nearest of the training images: large for what is not a digit."""
    return float(torch.cdist(images, to).min(1).values.mean())


def experiment(setup: Setup, seed: int, fault: str | None) -> tuple[Figures, Any]:
    """Train with three values of β; the figures with their goals, and the images of the picture."""
    images, test, labels = digits(seed)
    one, four = (train(setup, images, beta, seed) for beta in (0.0 if fault == "no_kl" else 1.0, 4.0))
    plain = train(setup, images, 0.0, seed)
    by_hand = float(kl(torch.tensor(1.10), 2 * torch.tensor(0.52).log()))
    sampled, ratio = two_estimators(200_000)
    with torch.no_grad():
        samples, garbage = (model.decoder(torch.randn(500, setup.code)) for model in (one, plain))
        (mu, log_var), (mu_4, log_var_4) = one.encode(test), four.encode(test)
        nats, nats_4 = float(kl(mu, log_var).sum(-1).mean()), float(kl(mu_4, log_var_4).sum(-1).mean())
        error, error_4 = ((model.decoder(m) - test).square().mean() for model, m in ((one, mu), (four, mu_4)))
        corners = torch.stack([mu[labels == digit][0] for digit in (0, 7, 6, 4)])
        across = torch.linspace(0, 1, 9)[:, None, None]
        left, right = (torch.lerp(corners[i], corners[i + 2], across) for i in (0, 1))  # (9, 1, code)
        walk = one.decoder(torch.lerp(left, right, across.view(1, 9, 1)))  # (9, 9, 64)
    elbo, tighter = one.bounds(test, setup.draws)
    real = nearest(test, images)
    figures: Figures = {
        "KL by hand at μ = 1.10, σ = 0.52": (by_hand, 0.8935, 0.8945),
        "KL by sampling there": (sampled, 0.88, 0.91),
        "gradient's standard deviation, score function ÷ reparameterized": (ratio, 2.0, None),
        "KL at β = 1, nats": (nats, 9.0, 18.0),
        "KL at β = 4 ÷ at β = 1": (nats_4 / nats, None, 0.65),
        "error of copies at β = 4 ÷ at β = 1": (float(error_4 / error), 1.15, None),
        "ELBO at β = 1, minus that of the model of β = 4, nats": (elbo - four.bounds(test, setup.draws)[0], 2.0, None),
        "importance-weighted bound minus ELBO, nats": (tighter - elbo, 0.5, 10.0),
        "distance to the nearest digit, samples ÷ held-out digits": (nearest(samples, images) / real, None, 1.6),
        "the same without the KL term": (nearest(garbage, images) / real, 1.7, None),
        "pixel standard deviation, samples ÷ held-out digits": (float(samples.std(0).mean() / test.std(0).mean()), 0.6, 1.2),
    }
    return figures, {"samples": samples[:81].view(9, 9, 64), "garbage": garbage[:81].view(9, 9, 64), "walk": walk}


def draw(figure: Any, runs: list[Any]) -> None:
    """Samples with and without the KL term, and a walk between the codes of four held-out digits, of the first seed."""
    titles = {
        "samples": "codes from N(0, 1), β = 1",
        "garbage": "codes from N(0, 1), no KL term",
        "walk": "a walk between four codes",
    }
    for axes, (name, title) in zip(figure.subplots(1, 3), titles.items(), strict=True):
        tiles = torch.nn.functional.pad(runs[0][name].view(9, 9, 8, 8), (1, 1, 1, 1)).clamp(0, 1)
        axes.imshow(tiles.permute(0, 2, 1, 3).reshape(90, 90), cmap="Blues")
        axes.set(xticks=[], yticks=[], title=title)


RECIPE = dt.Recipe(
    experiment,
    draw,
    full=Setup(),
    quick=QUICK,
    faults={"no_kl": "distance to the nearest digit, samples ÷ held-out digits"},
    size=(11, 4),
)

if __name__ == "__main__":
    sys.exit(RECIPE.main())
