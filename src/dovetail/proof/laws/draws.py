"""Law 20, draws: dropout masks of different paths, seeds, layers and samples are independent, every layout of a batch has the
same masks, noise has the standard deviation that was asked for, and initial weights that which is declared for their role and
depth.

Bounds are six standard errors: |correlation| ≤ 6/√n and |rate − p| ≤ 6·√(p(1 − p)/n) for n draws, |s/σ − 1| ≤ 6/√(2n) for the
standard deviation s of n initial weights. Quick laws at 31 seeds compare s of about 36,000 tensors, and as many correlations;
the masks are the same at every seed. A correct generator then fails in fewer than one of 8,000 such runs: s has a χ
distribution, whose upper tail is heavier than the normal one. (With five standard errors it failed in one of about 30.)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from math import sqrt

import torch
from torch import Tensor

from dovetail.model.construction import initial_slice
from dovetail.model.model import Model
from dovetail.nn.ctx import Ctx
from dovetail.nn.draws import Draws
from dovetail.nn.layout import TokenLayout
from dovetail.proof.laws.case import ARRANGEMENTS, LENGTHS, Case, N, law
from dovetail.spec.fold import Declared, declared
from dovetail.spec.part import from_data

P, STD = 0.3, 0.7
ERRORS = 6.0  # standard errors
ENOUGH = 64  # fewest values of which a standard deviation or a correlation is compared


@law(20, "draws", "masks of paths, seeds and samples are independent, and initial weights have the declared spread", "values")
@torch.no_grad()
def draws(case: Case) -> None:
    """Test dropout masks, noise, then initial weights."""
    _masks(case)
    _noise(case)
    _layouts(case)
    _spreads(case)


def _sites(case: Case) -> Iterator[tuple[str, int]]:
    """(branch, layer) of every dropout of a wire."""
    for i, block in enumerate(case.spec.layers):
        for branch in block.branches():
            yield branch, i


def mask(case: Case, branch: str, layer: int, layout: TokenLayout, seed: int = 1) -> Tensor:
    """(…, n, embed) 1 where the wire of a layer keeps a value of a branch, 0 where it drops it."""
    block = case.model.layers[layer]
    x = torch.ones(*layout.order.shape, case.spec.width)
    return (Draws(seed).dropout(Ctx(layout=layout), x, P, block, branch) > 0).double()


def _masks(case: Case) -> None:
    layout = TokenLayout.whole(4, N)
    masks = {f"layer {i}, {branch}": mask(case, branch, i, layout) for branch, i in _sites(case)}
    branch, layer = next(_sites(case))
    masks["another seed"] = mask(case, branch, layer, layout, seed=2)
    for name, values in masks.items():
        n = values.numel()
        rate = 1.0 - values.mean().item()
        case.true(abs(rate - P) <= ERRORS * sqrt(P * (1 - P) / n), f"{name}: the dropout rate is {rate:.3f}, not {P}")
        _uncorrelated(case, values[:2], values[2:], f"{name}, two samples and the next two")
        _uncorrelated(case, values[:, 1:], values[:, :-1], f"{name}, a position and the next")
        _uncorrelated(case, values[..., 1:], values[..., :-1], f"{name}, a channel and the next")
    for (a, first), (b, second) in itertools.combinations(masks.items(), 2):
        _uncorrelated(case, first, second, f"{a} and {b}")


def _noise(case: Case) -> None:
    """Noise has the standard deviation that was asked for, and a mean of 0."""
    branch, layer = next(_sites(case))
    ctx = Ctx(layout=TokenLayout.whole(4, N))
    noise = Draws(1).noise(ctx, torch.zeros(4, N, case.spec.width), STD, case.model.layers[layer], branch).double()
    n, std, mean = noise.numel(), noise.square().mean().sqrt().item(), noise.mean().item()
    case.true(abs(std / STD - 1) <= ERRORS / sqrt(2 * n), f"the standard deviation of noise is {std:.3f}, not {STD}")
    case.true(abs(mean) <= ERRORS * STD / sqrt(n), f"the mean of noise is {mean:.3f}, not 0")
    _uncorrelated(case, noise[..., 1:], noise[..., :-1], "noise of a channel and of the next")


def _uncorrelated(case: Case, a: Tensor, b: Tensor, pair: str) -> None:
    if a.numel() < ENOUGH:
        return
    correlation = torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1].item()
    case.true(abs(correlation) <= ERRORS / sqrt(a.numel()), f"{pair} are correlated: {correlation:.3f}")


def _layouts(case: Case) -> None:
    branch, layer = next(_sites(case))
    alone = [mask(case, branch, layer, TokenLayout.whole(1, n).numbered(r))[0] for r, n in enumerate(LENGTHS)]
    for batch in ARRANGEMENTS:
        for r, row in enumerate(batch.split(mask(case, branch, layer, batch.make()))):
            case.true(torch.equal(row, alone[r]), f"{batch.what.format(r)} has another mask than alone")


def ends_branch(d: Declared) -> bool:
    """Whether the output of this matrix is added to the residual stream of a stack of layers."""
    return d.weight.matmul and bool(d.scope.stack) and d.scope.names(d.weight.out) == ("embed",)


def _spreads(case: Case) -> None:
    by_shape: dict[tuple[int, ...], tuple[str, Tensor]] = {}
    for d in _random(case.spec):
        want = d.scope.init.std(d.weight, d.scope)
        value = initial_slice(d, case.seed, ()).double()
        size = value.numel()
        if size >= ENOUGH:
            std = value.square().mean().sqrt().item()
            case.true(abs(std / want - 1) <= ERRORS / sqrt(2 * size), f"{d.path}: std is {std:.4g}, not {want:.4g}")
        slices = [slice(length // 3, length // 3 + max(1, length // 2)) for length in value.shape]
        part = initial_slice(d, case.seed, slices).double()
        case.true(torch.equal(part, value[tuple(slices)]), f"{d.path}: a slice differs from that of the whole tensor")
        if tuple(value.shape) in by_shape:
            other, before = by_shape[tuple(value.shape)]
            _uncorrelated(case, before, value, f"initial weights {other} and {d.path}")
        by_shape[tuple(value.shape)] = d.path, value
    # the default rule, written out again: a smaller standard deviation, by depth, for matrices that end a branch (GPT-2)
    plain = case.spec.swap("init", from_data({}, Model).init)
    for d in _random(plain):
        spread = 0.02 / sqrt(2 * d.scope.depth) if ends_branch(d) else 0.02
        std = d.scope.init.std(d.weight, d.scope)
        case.true(abs(std - spread) <= 1e-12, f"{d.path}: a standard deviation of {std:.4g} is declared, not {spread:.4g}")


def _random(spec: Model) -> Iterator[Declared]:
    return (d for d in declared(spec) if d.weight.learned and d.weight.init == "normal")
