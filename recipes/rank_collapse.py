"""Rank collapse: attention without residual connections makes all tokens equal, doubly exponentially in depth.

    X (n, width), one row per token        r(X) = ‖X − 1 x̄ᵀ‖ ÷ ‖X‖        r = 0: all tokens are equal, the rank is 1
    softmax(Q Kᵀ) V     r ← c r³     averages rows, with weights that differ from row to row by r² only (Dong et al. 2021)
    x + f(x)            r ← c r      the residual connection carries what differs past the average

From the weights at initialization, residual connections and feed-forwards are removed in turn. A residual connection is
removed by a patch: the sum of a branch with the stream is replaced by what the branch adds. Depth shows the collapse; one
layer, on token matrices with r set from 0.1 to 0.001, shows its exponent: 3 for attention, 1 with a residual connection, and 1
for attention with RoPE too, whose weights depend on the distance also between equal tokens, so that it collapses exponentially.
A feed-forward works on each token by itself and does not prevent the collapse.

    python recipes/rank_collapse.py [--seeds 3] [--quick] [--out rank_collapse]      seconds
    python recipes/rank_collapse.py --quick --fault kept                             no residual connection is removed
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

    width: int = 32
    vocab: int = 64
    tokens: int = 24
    rows: int = 16
    depth: int = 12


QUICK = Setup(rows=4, depth=8)
BLUE, ORANGE, GREY = "#2f5fb3", "#d9822b", "#8a90a0"


@dc.dataclass(frozen=True)
class Variant:
    """What is left of a layer."""

    residual: bool
    ffn: bool
    position: str = "none"
    look: tuple[str, str] = (GREY, "-")


VARIANTS = {
    "residuals, FFN": Variant(True, True, look=(BLUE, "-")),
    "residuals": Variant(True, False, look=(BLUE, "--")),
    "FFN": Variant(False, True, look=(ORANGE, "-")),
    "attention only": Variant(False, False, look=(ORANGE, "--")),
    "attention only, RoPE": Variant(False, False, "rope"),
}


def build(setup: Setup, variant: Variant, layers: int, seed: int) -> dt.Transformer:
    """An encoder; a part's initial weights are the same whether or not others are there."""
    ffn = "{kind: mlp, hidden: 128}" if variant.ffn else "null"
    mixer = f"{{kind: attention, heads: 4, mask: full, position: {variant.position}}}"
    spec = dt.from_yaml(
        f"{{width: {setup.width}, vocab: {setup.vocab}, init: fan_in, norm: layernorm, head: null,"
        f" layers: [{{repeat: {layers}, norm: layernorm, mixer: {mixer}, ffn: {ffn}}}]}}"
    )
    return dt.build(spec, seed=seed, dtype="float64")


class Branch:
    """The sum x + f(x) of a branch, replaced by f(x)."""

    def __init__(self) -> None:
        self.added: Tensor | None = None

    def remember(self, added: Tensor) -> Tensor:
        self.added = added
        return added

    def instead(self, _: Tensor) -> Tensor:
        assert self.added is not None
        return self.added


def without_residuals(variant: Variant, layers: int) -> dict[str, Any]:
    """The patch that removes the residual connection of every branch."""
    patch = dict[str, Any]()
    for layer in range(layers):
        for name in ("mixer", "ffn") if variant.ffn else ("mixer",):
            branch = Branch()
            patch[f"layers.{layer}.{name}_add"] = branch.remember
            patch[f"layers.{layer}.after_{name}"] = branch.instead
    return patch


def stream(model: dt.Transformer, ids: Tensor, variant: Variant, keep: bool, patch: dict[str, Any]) -> list[Tensor]:
    """The token matrices (rows, n, width): the embeddings, and the output of each layer."""
    layers = len(model.layers)
    removed = {} if variant.residual or keep else without_residuals(variant, layers)
    after = "after_ffn" if variant.ffn else "after_mixer"
    return list(model.trace(ids, "embedded", f"layers.*.{after}", patch={**removed, **patch}).values())


def difference(x: Tensor) -> float:
    """log₁₀ of r, the mean of the rows."""
    centered = x - x.mean(1, keepdim=True)
    return float((centered.flatten(1).norm(dim=1) / x.flatten(1).norm(dim=1)).log10().mean())


def rank(x: Tensor) -> float:
    """The number of singular values above a thousandth of the largest, the mean of the rows."""
    values = torch.linalg.svdvals(x)
    return float((values > 1e-3 * values[:, :1]).sum(-1).double().mean())


def exponent(setup: Setup, variant: Variant, seed: int, keep: bool) -> float:
    """The slope of log r after one layer against log r before it."""
    model, draw = build(setup, variant, 1, seed), torch.Generator().manual_seed(seed)
    shape = (setup.rows, setup.tokens, setup.width)
    shared = torch.randn(setup.rows, 1, setup.width, generator=draw, dtype=torch.float64)
    own = torch.randn(shape, generator=draw, dtype=torch.float64)
    ids, points = torch.zeros(shape[:2], dtype=torch.long), list[list[float]]()
    for power in (-1.0, -1.5, -2.0, -2.5, -3.0):
        matrices = stream(model, ids, variant, keep, {"embedded": shared + 10**power * own})
        points.append([difference(x) for x in matrices])
    before, after = torch.tensor(points).T
    before = before - before.mean()
    return float((before * (after - after.mean())).sum() / before.square().sum())


Figures = dict[str, tuple[float, float | None, float | None]]


def experiment(setup: Setup, seed: int, fault: str | None) -> tuple[Figures, Any]:
    """Measure r and the rank by depth, and the exponent of one layer, of every variant."""
    keep = fault == "kept"
    ids = torch.rand(setup.rows, setup.vocab, generator=torch.Generator().manual_seed(seed)).argsort(-1)[:, : setup.tokens]
    shown, figures = dict[str, tuple[list[float], list[float]]](), Figures()
    for name, variant in VARIANTS.items():
        print(f"  seed {seed}: {name}", file=sys.stderr, flush=True)
        matrices = stream(build(setup, variant, setup.depth, seed), ids, variant, keep, {})
        shown[name] = [difference(x) for x in matrices], [rank(x) for x in matrices]
    goals: dict[str, tuple[float | None, float | None]] = {
        "residuals, FFN": (-0.6, None),
        "residuals": (-0.6, None),
        "FFN": (None, -10.0),
        "attention only": (None, -10.0),
        "attention only, RoPE": (-10.0, -2.5),
    }
    for name, goal in goals.items():
        figures[f"log₁₀ r after {setup.depth} layers: {name}"] = (shown[name][0][-1], *goal)
    for name, variant in VARIANTS.items():
        goal = (0.8, 1.2) if variant.residual or variant.position == "rope" else (2.7, 3.3)
        figures[f"exponent of one layer: {name}"] = (exponent(setup, variant, seed, keep), *goal)
    for name, goal in {"residuals, FFN": (0.9 * setup.tokens, None), "FFN": (None, 1.5), "attention only": (None, 1.5)}.items():
        figures[f"rank of {setup.tokens} tokens after {setup.depth} layers: {name}"] = (shown[name][1][-1], *goal)
    return figures, shown


def draw(figure, runs: list[Any]) -> None:
    """Draw r and the rank by depth, of all seeds."""
    by_depth, ranks = figure.subplots(1, 2)
    for shown in runs:
        for name, (differences, values) in shown.items():
            color, dashes = VARIANTS[name].look
            label = name if shown is runs[0] else None
            by_depth.plot(differences, color=color, ls=dashes, lw=1.3, label=label)
            ranks.plot(values, color=color, ls=dashes, lw=1.3)
    by_depth.set(xlabel="layers", ylabel="log₁₀ r", title="how much the tokens differ")
    ranks.set(xlabel="layers", ylabel="singular values above 1/1000", title="rank of the token matrix", ylim=(0, None))
    by_depth.text(len(runs[0]["FFN"][0]) - 1, -15.2, "rounding of float64", ha="right", va="bottom", color=GREY)
    by_depth.legend(frameon=False, loc="center right", bbox_to_anchor=(1.0, 0.3))


FAULTS = {"kept": "exponent of one layer: attention only"}
RECIPE = dt.Recipe(experiment, draw, full=Setup(), quick=QUICK, faults=FAULTS, size=(10, 4))

if __name__ == "__main__":
    sys.exit(RECIPE.main())
