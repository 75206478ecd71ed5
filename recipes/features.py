"""Features in superposition: a small model keeps more features than it has dimensions, and a sparse autoencoder finds them.

    row:  7 31 4 7      →  at each token, any token so far         the model has to keep the set of tokens that it has read

One layer of attention averages the values of the tokens, so what it adds to the residual stream is x = Σ_t a_t d_t: few of
`vocab` directions d_t at a time, in a space of fewer dimensions. The directions are known: d_t is what the layer adds to a row
of the token t only. A TopK sparse autoencoder, which sees only the sums, must find them (Elhage et al. 2022; Gao et al. 2024).
Adding the direction of one feature has to make the model recall that token. Every result has a goal that can fail.

    python recipes/features.py [--seeds 3] [--quick] [--out features]        a minute on two cores; seconds with --quick
    python recipes/features.py --quick --fault dense                         without sparsity: the goals fail
"""

from __future__ import annotations

import dataclasses as dc
import sys

import torch
import torch.nn.functional as F
from torch import Tensor

import dovetail as dt


@dc.dataclass(frozen=True)
class Setup:
    """The sizes of the experiment."""

    vocab: int = 64
    width: int = 32
    length: int = 4
    steps: int = 600  # of the model
    sae_steps: int = 3000
    features: int = 96  # of the autoencoder
    batch: int = 256


QUICK = Setup(vocab=32, width=20, steps=300, sae_steps=1200, features=48)
ADDRESS = "layers.0.mixer_add"


def rows(setup: Setup, count: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random tokens (rows, n), and at each a random one of those so far."""
    ids = torch.randint(setup.vocab, (count, setup.length), generator=draw)
    earlier = (torch.rand(ids.shape, generator=draw) * (torch.arange(setup.length) + 1)).long()
    return ids, ids.gather(1, earlier)


def train(setup: Setup, seed: int) -> dt.Transformer:
    """A model that recalls the tokens it has read."""
    spec = dt.from_yaml(f"""
        width: {setup.width}
        vocab: {setup.vocab}
        init: {{kind: normal, spread: 0.15}}
        layers:
        - {{mixer: {{heads: 1, position: none}}, ffn: null}}
        head: {{kind: lm, tied: false}}
    """)
    model, draw = dt.build(spec, seed=seed), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, betas=(0.9, 0.99))
    for step in range(setup.steps):
        loss = model.loss(*rows(setup, setup.batch, draw))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        say(f"model, seed {seed}, step {step + 1} of {setup.steps}: loss {float(loss.detach()):.3f}", step + 1 == setup.steps)
    return model


def say(text: str, last: bool) -> None:
    """Show progress on one line of stderr."""
    print(f"  {text}", end="\n" if last else "\r", file=sys.stderr, flush=True)


def directions(model: dt.Transformer, setup: Setup) -> Tensor:
    """(vocab, embed) what the layer adds to a row of one token only, minus the mean: the weights of attention sum to 1, so the
    mean is in every activation."""
    alone = torch.arange(setup.vocab)[:, None].expand(-1, setup.length)
    added = dt.look.trace(model, alone, ADDRESS)[ADDRESS][:, -1]
    return added - added.mean(0)


Figures = dict[str, tuple[float, float | None, float | None]]  # name -> value, lowest and highest that hold


def experiment(setup: Setup, seed: int, fault: str | None) -> tuple[Figures, Tensor]:
    """Train model and autoencoder of a seed; the figures with their goals, and (vocab, features) the cosines."""
    model, draw = train(setup, seed), torch.Generator().manual_seed(10**6 + seed)
    ids, targets = rows(setup, 8192, draw)
    activations = dt.look.trace(model, ids, ADDRESS)[ADDRESS]
    sae = dt.look.train_sae(
        activations,
        ADDRESS,
        features=setup.features,
        k=setup.features if fault == "dense" else setup.length,
        steps=setup.sae_steps,
        batch=512,
        lr=4e-3,
        seed=seed,
        progress=lambda i, n, left: say(f"autoencoder, seed {seed}, step {i} of {n}: unexplained {left:.3f}", i == n),
    )

    def loss(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten())

    quality = sae.measure(model, ids, loss)
    cosines = F.normalize(directions(model, setup), dim=-1) @ sae.W_dec.T
    best, match = cosines.max(-1)  # of each token, the feature with its direction

    plain = dt.look.trace(model, ids[:256], "head.logits")["head.logits"][:, -1]
    by = float(activations.norm(dim=-1).mean())
    hits = 0
    for token, feature in enumerate(match.tolist()):
        patch = sae.steer(feature, by)
        steered = dt.look.trace(model, ids[:256], "head.logits", patch=patch)["head.logits"][:, -1]
        hits += int((steered.softmax(-1) - plain.softmax(-1)).mean(0).argmax()) == token
    figures: Figures = {
        "features ÷ dimensions": (setup.vocab / setup.width, 1.5, None),
        "accuracy of recall (the token is one of the row)": (recalled(plain, ids[:256]), 0.95, None),
        "fraction of features found (cosine ≥ 0.9)": (float((best >= 0.9).float().mean()), 0.8, None),
        "steering by a feature recalls its token, fraction": (hits / setup.vocab, 0.8, None),
        "explained variance": (quality.explained, 0.8, None),
        "loss recovered": (quality.recovered, 0.8, None),
        "active features per token (L0)": (quality.l0, None, setup.length),
        "dead features ÷ all": (quality.dead / setup.features, None, 0.5),
    }
    return figures, cosines[:, match]


def recalled(logits: Tensor, ids: Tensor) -> float:
    """The fraction of rows whose most probable token is one of theirs."""
    return float((logits.argmax(-1)[:, None] == ids).any(-1).float().mean())


def draw(figure, runs: list[Tensor]) -> None:
    """Draw the cosine of each known direction with the feature that matches each, of the first seed."""
    cosines = runs[0]
    table, counts = figure.subplots(1, 2)
    image = table.imshow(cosines, cmap="RdBu", vmin=-1, vmax=1)
    figure.colorbar(image, ax=table, label="cosine")
    table.set(xlabel="feature that matches token", ylabel="direction of token", title="directions and features")
    counts.hist(cosines.diagonal(), bins=30, range=(0, 1), color="#2f5fb3")
    counts.axvline(0.9, color="#d9822b", lw=1)
    counts.set(xlabel="cosine with the matched feature", ylabel="directions", title="how well each is found")


RECIPE = dt.Recipe(
    experiment, draw, full=Setup(), quick=QUICK, faults={"dense": "fraction of features found (cosine ≥ 0.9)"}, size=(9, 3.6)
)

if __name__ == "__main__":
    sys.exit(RECIPE.main())
