"""A masked-diffusion language model: text is generated in any order, several tokens at once.

    forward     k of the n tokens, at random places, become [mask]            k uniform from 1 to n
    model       a transformer with `mask: full` predicts all of them at once
    loss        n / k · Σ_masked −log p(token | what is left)                 ≥ −log p(text) on average
    sample      start from n masks; in each of s steps fill n / s of them

The loss is a bound on the negative log-likelihood, as that of a VAE is: averaged over k it is the loss of an autoregressive
model over all orders (Sahoo et al. 2024; Shi et al. 2024). The language is made and its entropy known: no bound may be below
it. Tokens that are filled in one step are independent of each other, so few steps give text that the language would
not; with one token per step nothing is lost but what the model has not learned.

    python recipes/diffusion_text.py [--seeds 3] [--quick] [--out diffusion_text]
    python recipes/diffusion_text.py --quick --fault unweighted     without n / k the loss is no bound: it is below the entropy
"""

from __future__ import annotations

import dataclasses as dc
import itertools
import math
import sys
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import dovetail as dt


@dc.dataclass(frozen=True)
class Setup:
    """The sizes of the experiment."""

    vocab: int = 6
    length: int = 12
    width: int = 48
    layers: int = 2
    steps: int = 600
    batch: int = 64
    lr: float = 0.006
    draws: int = 8  # times that each test text is masked


QUICK = Setup(vocab=5, length=8, width=32, steps=300, lr=0.01)
Figures = dict[str, tuple[float, float | None, float | None]]  # name -> value, lowest and highest that hold


@dc.dataclass(frozen=True)
class Language:
    """table (vocab, vocab): the probabilities of the next token; the first token is uniform."""

    table: Tensor

    def rows(self, count: int, length: int, draw: torch.Generator) -> Tensor:
        """Texts (count, length)."""
        ids = torch.randint(len(self.table), (count, length), generator=draw)
        for i in range(1, length):
            ids[:, i] = torch.multinomial(self.table[ids[:, i - 1]], 1, generator=draw)[:, 0]
        return ids

    def surprise(self, ids: Tensor) -> float:
        """−log p of texts under the language, nats per token: of its own texts, the entropy."""
        steps = -self.table[ids[:, :-1], ids[:, 1:]].log().sum(1) + math.log(len(self.table))
        return float(steps.mean() / ids.shape[1])


def language(setup: Setup, seed: int) -> Language:
    """A random table: after a token, few others are probable."""
    torch.manual_seed(seed)
    rows = torch.distributions.Dirichlet(torch.full((setup.vocab,), 0.25)).sample((setup.vocab,))
    return Language(0.99 * rows + 0.01 / setup.vocab)


def masked(ids: Tensor, mask: int, draw: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Texts with k random tokens masked, where they are, and the weight n / k of each text."""
    count, n = ids.shape
    k = torch.randint(1, n + 1, (count, 1), generator=draw)
    hidden = torch.rand(count, n, generator=draw).argsort(1) < k
    return ids.masked_fill(hidden, mask), hidden, n / k


def bound(model: dt.Transformer, ids: Tensor, draw: torch.Generator, weighted: bool) -> Tensor:
    """The loss in nats per token; without the weight, the mean over masked tokens is replaced by their plain sum over n."""
    inputs, hidden, weight = masked(ids, model.spec.vocab - 1, draw)
    losses = cross_entropy(model(inputs).flatten(0, 1), ids.flatten(), reduction="none").view(ids.shape)
    return ((weight if weighted else 1.0) * losses * hidden).mean()


def train(setup: Setup, made: Language, seed: int, weighted: bool) -> dt.Transformer:
    """A trained denoiser."""
    draw = torch.Generator().manual_seed(seed)
    spec = dt.from_yaml(
        f"{{width: {setup.width}, vocab: {setup.vocab + 1}, init: {{kind: normal, spread: 0.08}},"  # one more token: [mask]
        f" layers: [{{repeat: {setup.layers}, mixer: {{heads: 4, mask: full}}}}]}}"
    )
    model = dt.build(spec, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), setup.lr, betas=(0.9, 0.99), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, setup.lr, total_steps=setup.steps, pct_start=0.1)
    for step in range(setup.steps):
        loss = bound(model, made.rows(setup.batch, setup.length, draw), draw, weighted)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 49 or step + 1 == setup.steps:
            end = "\n" if step + 1 == setup.steps else "\r"
            print(f"  step {step + 1}: bound {loss.item():.3f} nats per token", end=end, file=sys.stderr, flush=True)
    return model


@torch.no_grad()
def generate(model: dt.Transformer, count: int, length: int, steps: int, draw: torch.Generator) -> Tensor:
    """Texts (count, length) in so many steps, each of which fills as many random places."""
    mask = model.spec.vocab - 1
    ids, order = torch.full((count, length), mask), torch.rand(count, length, generator=draw).argsort(1)
    for step in range(steps):
        probs = model(ids)[..., :mask].softmax(-1)
        drawn = torch.multinomial(probs.flatten(0, 1), 1, generator=draw).view(count, length)
        now = (order >= step * length // steps) & (order < (step + 1) * length // steps)
        ids = torch.where(now, drawn, ids)
    return ids


def experiment(setup: Setup, seed: int, fault: str | None) -> tuple[Figures, Any]:
    """Train and sample; the figures with their goals, and the surprise by steps."""
    made, draw = language(setup, seed), torch.Generator().manual_seed(10**6 + seed)
    model = train(setup, made, seed, fault != "unweighted")
    test = made.rows(1000, setup.length, draw)
    with torch.no_grad():
        bounds = [float(bound(model, test, draw, fault != "unweighted")) for _ in range(setup.draws)]
    entropy, value = made.surprise(test), sum(bounds) / len(bounds)
    steps = [n for n in (1, 2, 3, 4, 6, 8, 12) if setup.length % n == 0]
    surprise = {s: made.surprise(generate(model, 1000, setup.length, s, draw)) for s in steps}
    excess = {s: value - entropy for s, value in surprise.items()}
    figures: Figures = {
        "entropy of the language, nats per token": (entropy, None, None),
        "bound minus entropy": (value - entropy, -0.01, 0.2),
        "nats above the entropy, text of one step": (excess[1], 0.8, None),
        "nats above the entropy, text of two tokens per step": (excess[setup.length // 2], None, None),
        "nats above the entropy, one token per step": (excess[setup.length], None, 0.5),
        "one token per step ÷ one step": (excess[setup.length] / excess[1], None, 0.35),
        "largest rise from one number of steps to the next": (
            max(excess[b] - excess[a] for a, b in itertools.pairwise(steps)),
            None,
            0.05,
        ),
    }
    return figures, {"surprise": surprise, "entropy": entropy, "bound": value}


def draw(figure: Any, runs: list[Any]) -> None:
    """How surprising the samples are to the language, by steps, above its entropy, of every seed."""
    axes = figure.subplots()
    for run in runs:
        label = "samples" if run is runs[0] else None
        values = [value - run["entropy"] for value in run["surprise"].values()]
        axes.plot(list(run["surprise"]), values, "o-", color="#2f5fb3", lw=1.3, label=label)
        bound_label = "the model's bound" if run is runs[0] else None
        axes.axhline(run["bound"] - run["entropy"], color="#d9822b", ls="--", lw=1, label=bound_label)
    axes.axhline(0, color="#8a90a0", lw=1, label="entropy of the language")
    steps = list(runs[0]["surprise"])
    axes.set(xscale="log", xlabel="steps of sampling", ylabel="−log p of the text, nats per token above the entropy")
    axes.set_xticks(steps, [str(s) for s in steps])
    axes.minorticks_off()
    axes.legend(frameon=False)


RECIPE = dt.Recipe(experiment, draw, full=Setup(), quick=QUICK, faults={"unweighted": "bound minus entropy"}, size=(6.5, 4))

if __name__ == "__main__":
    sys.exit(RECIPE.main())
