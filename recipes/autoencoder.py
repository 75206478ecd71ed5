"""An autoencoder: a network that copies its input through a narrow code.

    x (64) → encoder → z (8) → decoder → x̂ (64)        loss: ‖x − x̂‖², averaged over images

1. Both maps linear: the best code of k numbers is the projection onto the first k principal components, so the trained decoder
   spans their subspace (Baldi & Hornik 1989). It need not find the components themselves: any invertible map of the code
   will do. The largest principal angle between both subspaces is 0, and the errors are equal.
2. Noise in, clean image out (Vincent et al. 2008): the network learns what an image looks like, and removes the noise.
3. A network that copies digits 0 to 4 copies other digits badly: its error is an anomaly score.
4. Nothing says which codes belong to images: a random code decodes to garbage. `vae.py` adds what is missing.

The images are the 1,797 handwritten digits of scikit-learn, 8 × 8, with values from 0 to 1.

    python recipes/autoencoder.py [--seeds 3] [--quick] [--out autoencoder]    pip install "dovetail-lm[plots,recipes]"
    python recipes/autoencoder.py --quick --fault noiseless        the denoiser never saw noise: it removes none
    python recipes/autoencoder.py --quick --fault uncentered       without biases: another subspace than that of PCA
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
    steps: int = 2000
    batch: int = 64
    lr: float = 2e-3
    noise: float = 0.4  # standard deviation; that of a pixel is 0.38
    usual: int = 5  # digits below it are usual, the others anomalies
    iterations: int = 1200  # of L-BFGS, for the linear autoencoder


QUICK = Setup(hidden=96, steps=500, lr=4e-3, iterations=400)
Figures = dict[str, tuple[float, float | None, float | None]]  # name -> value, lowest and highest that hold


def digits(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images (1300, 64) and labels for training, then 497 of each for the test."""
    from sklearn.datasets import load_digits

    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(seed))
    images = torch.tensor(data.data, dtype=torch.float32)[order] / 16
    labels = torch.tensor(data.target)[order]
    return images[:1300], labels[:1300], images[1300:], labels[1300:]


def linear_and_pca(setup: Setup, images: Tensor, bias: bool) -> tuple[float, float]:
    """The largest principal angle in degrees between a trained linear decoder and the first components, and the ratio of the
    autoencoder's error to that of PCA."""
    x = images.double()  # an angle of 0.01° needs it
    centered = x - x.mean(0)
    _, values, components = torch.linalg.svd(centered, full_matrices=False)
    model = nn.Sequential(nn.Linear(64, setup.code, bias), nn.Linear(setup.code, 64, bias)).double()
    optimizer = torch.optim.LBFGS(
        model.parameters(), max_iter=setup.iterations, tolerance_change=1e-14, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        error = (model(x) - x).square().sum(1).mean()
        error.backward()
        return error

    print(f"  linear: error {optimizer.step(loss).item():.5f} → {loss().item():.5f}", file=sys.stderr, flush=True)
    decoder = model[1].weight.detach()  # (64, code)
    cosines = torch.linalg.svdvals(torch.linalg.qr(decoder).Q.T @ components[: setup.code].T)
    pca_error = values[setup.code :].square().sum() / len(x)
    return math.degrees(math.acos(min(1.0, float(cosines.min())))), loss().item() / float(pca_error)


def train(setup: Setup, images: Tensor, code: int, noise: float, name: str) -> nn.Sequential:
    """An autoencoder of two hidden layers that reads images with noise and is trained on the clean ones."""
    h = setup.hidden
    encoder = nn.Sequential(nn.Linear(64, h), nn.GELU(), nn.Linear(h, code))
    decoder = nn.Sequential(nn.Linear(code, h), nn.GELU(), nn.Linear(h, 64))
    model = nn.Sequential(encoder, decoder)
    optimizer = torch.optim.Adam(model.parameters(), setup.lr)
    for step in range(setup.steps):
        clean = images[torch.randint(len(images), (setup.batch,))]
        loss = (model(clean + noise * torch.randn_like(clean)) - clean).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 250 == 249:
            end = "\n" if step + 1 == setup.steps else "\r"
            print(f"  {name}: step {step + 1}, error {loss.item():.4f}", end=end, file=sys.stderr, flush=True)
    return model


def auroc(usual: Tensor, anomalies: Tensor) -> float:
    """The probability that a random anomaly has a larger score than a random usual image: 0.5 by chance."""
    return float((anomalies[:, None] > usual).float().mean())


@torch.no_grad()
def nearest(images: Tensor, to: Tensor) -> float:
    """The mean distance of images to the nearest of the training images: large for what is not a digit."""
    return float(torch.cdist(images, to).min(1).values.mean())


def experiment(setup: Setup, seed: int, fault: str | None) -> tuple[Figures, Any]:
    """Train the four autoencoders of a seed; the figures with their goals, and the images of the picture."""
    torch.manual_seed(seed)
    images, labels, test, test_labels = digits(seed)
    angle, ratio = linear_and_pca(setup, images, bias=fault != "uncentered")
    copier = train(setup, images, setup.code, 0.0, "copies")
    denoiser = train(setup, images, 2 * setup.code, 0.0 if fault == "noiseless" else setup.noise, "denoises")
    usual = train(setup, images[labels < setup.usual], setup.code, 0.0, f"copies digits below {setup.usual}")
    with torch.no_grad():
        noisy = test + setup.noise * torch.randn_like(test)
        denoised = denoiser(noisy)
        scores = (usual(test) - test).square().mean(1)
        codes = copier[0](images)
        low, high = codes.amin(0), codes.amax(0)
        garbage = copier[1](low + (high - low) * torch.rand(500, setup.code))
        copies = copier(test)
    is_usual, real = test_labels < setup.usual, nearest(test, images)
    figures: Figures = {
        "linear: largest angle to PCA's subspace, degrees": (angle, None, 1.0),
        "linear: error ÷ error of PCA": (ratio, 0.9999, 1.001),
        "two hidden layers: error ÷ error of PCA": (ratio_to_pca(setup, images, test, copies), None, 0.8),
        "denoising: error left ÷ noise": (
            float((denoised - test).square().mean() / (noisy - test).square().mean()),
            None,
            0.25,
        ),
        "anomaly score: area under the ROC curve": (auroc(scores[is_usual], scores[~is_usual]), 0.9, None),
        "distance to the nearest digit, copies ÷ held-out digits": (nearest(copies, images) / real, None, 1.2),
        "distance to the nearest digit, random codes ÷ held-out digits": (nearest(garbage, images) / real, 1.8, None),
    }
    rows = {"held-out digits": test, "copies": copies, "with noise": noisy, "denoised": denoised, "random codes": garbage}
    return figures, {"rows": {name: row[:10] for name, row in rows.items()}, "scores": (scores[is_usual], scores[~is_usual])}


def ratio_to_pca(setup: Setup, images: Tensor, test: Tensor, copies: Tensor) -> float:
    """The error of copies of held-out images, relative to that of PCA with as many numbers."""
    mean = images.mean(0)
    components = torch.linalg.svd(images - mean, full_matrices=False).Vh[: setup.code]
    projected = (test - mean) @ components.T @ components + mean
    return float((copies - test).square().mean() / (projected - test).square().mean())


def draw(figure: Any, runs: list[Any]) -> None:
    """Rows of images of the first seed, and the anomaly score of usual and other digits."""
    left, right = figure.subplots(1, 2, width_ratios=(1.4, 1))
    rows = runs[0]["rows"]
    tiles = [torch.nn.functional.pad(row.view(-1, 8, 8), (1, 1, 1, 1)).clamp(0, 1) for row in rows.values()]
    left.imshow(torch.cat([torch.cat(list(row), 1) for row in tiles]), cmap="Blues")
    left.set(xticks=[], yticks=[10 * i + 4.5 for i in range(len(rows))])
    left.set_yticklabels(rows, fontsize=10)
    left.tick_params(length=0)
    left.spines[:].set_visible(False)
    for scores, color, name in zip(runs[0]["scores"], ("#2f5fb3", "#d9822b"), ("digits 0 to 4", "digits 5 to 9"), strict=True):
        right.hist(scores, bins=torch.linspace(0, 0.12, 41), color=color, alpha=0.7, label=name)
    right.set(
        xlabel="error of the copy, per pixel",
        ylabel="held-out images",
        title="trained on digits 0 to 4 only",
        xticks=[0, 0.04, 0.08, 0.12],
    )
    right.spines[["top", "right"]].set_visible(False)
    right.legend(frameon=False)


RECIPE = dt.Recipe(
    experiment,
    draw,
    full=Setup(),
    quick=QUICK,
    faults={
        "noiseless": "denoising: error left ÷ noise",
        "uncentered": "linear: largest angle to PCA's subspace, degrees",
    },
    size=(11, 4),
)

if __name__ == "__main__":
    sys.exit(RECIPE.main())
