"""Direct logit attribution: what each component adds to a logit through the residual stream alone.

    x = embedded + Σ_c a_c        m(x) − m(0) = Σ_c a_c · g        g = ∫₀¹ ∂m/∂x (α x) dα

m is a logit, a difference of two, or any metric of the logits. The scales of norms, and the weights with which several residual
streams are mixed, are frozen at their values on the run, so that a final norm is linear and g is its plain gradient; where the
head is not linear (a soft-cap, a dense layer) the integral is a Gauss–Legendre sum. The attributions and `bias` (the metric of
an empty stream: shifts and biases) sum to m exactly; an InputError is raised where they do not.

    attribute(model, ids, 17)                          the logit of token 17 at the last position, by component
    attribute(model, ids, (17, 4), by="head")          a difference of logits, by head; the rest of a branch stays under its
                                                       own address. Also "expert", "token" (the tokens that a mixer reads)
    attribute(model, ids, 17, by="layers.3.ffn.hidden[channel]")        or any activation that its branch is linear in

Elhage et al. 2021; Wang et al. 2022.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from dovetail.base.errors import InputError, SpecError
from dovetail.look.address import Target, resolve
from dovetail.look.intervention import Replacement
from dovetail.look.record import Trace
from dovetail.look.sweeps import RowMetric, each_index
from dovetail.look.tracer import Tracer, listened, trace
from dovetail.model.model import Model, ModelModule
from dovetail.nn.ctx import Ctx
from dovetail.nn.groups import Mixer, Wire
from dovetail.nn.inputs import default_ctx
from dovetail.nn.layout import TokenLayout
from dovetail.spec.fold import taps
from dovetail.spec.part import walk

NODES = (1, 8, 32)  # of the sum: more where fewer are not exact
AXIS = {"head": "head", "expert": "expert", "token": "pos"}  # that each `by` sweeps
Wanted = int | tuple[int, int] | RowMetric


@dc.dataclass(frozen=True)
class Attribution:
    """What each component adds to a metric, and their sum; tensors (rows,)."""

    parts: dict[str, Tensor]
    total: Tensor

    def __repr__(self) -> str:
        means = sorted(((float(x.mean()), key) for key, x in self.parts.items()), key=lambda item: -abs(item[0]))
        more = [f"… and {len(means) - 20} more"] if len(means) > 20 else []
        lines = [f"{key:48}  {mean:+.4g}" for mean, key in means[:20]]
        return "\n".join([f"{float(self.total.mean()):.4g} in all (mean over rows); largest first", *lines, *more])


def attribute(
    model: ModelModule, tokens: Tensor, metric: Wanted, by: str | Sequence[str] = "component", *, ctx: Ctx | None = None
) -> Attribution:
    """Return what each component adds directly to a logit, to a difference of two, or to a metric of the logits (rows,).

    `by` is "component" (the embedding and what each branch adds), "head", "expert", "token", or addresses with slices, as in
    `sweep`.
    """
    spec, ctx = model.part, ctx or default_ctx(tokens, ranks=model.ranks)
    declared, of_logits = taps(spec), _row_metric(metric, ctx.layout)
    targets = [] if by == "component" else resolve(spec, _slices(spec, by))
    of_layers = [a for a in declared if a.startswith("layers.") and a.count(".") == 2]
    leaves = ["embedded", *(a for a in of_layers if a.endswith("_add"))]
    cuts = [a for a in of_layers if a not in leaves]
    inner = {t.address: _branch(t, leaves) for t in targets if t.address not in leaves}
    wires = tuple(f"{path}." for path, part, _ in walk(spec) if isinstance(part, Wire))
    scales = [a for a in declared if a.endswith(".scale") or a.startswith(wires)]  # a wire's are weights of residual streams
    scales = [a for a in scales if not a.startswith(("encoder.", "mtp."))]
    given = _given(spec, inner)
    chosen = {target.choices for target in targets} - {""}
    run = trace(model, tokens, *{*leaves, *inner, *scales, *given, *cuts, *chosen, "head.logits"}, ctx=ctx)
    frozen: dict[str, Replacement] = {a: run[a] for a in scales}
    total = of_logits(run["head.logits"])
    weights, bias = _weights(model, tokens, ctx, {a: run[a] for a in leaves}, frozen, of_logits, total)
    products = {a: run[a] * weights[a] for a in leaves}
    parts = {a: _rows(x) for a, x in products.items()}
    if inner:
        frozen |= {a: run[a] for a in (*given, *cuts)}
        branches = {a: weights[a] for a in dict.fromkeys(inner.values())}
        found, rest = _inside(model, tokens, ctx, {a: run[a] for a in inner}, branches, frozen)
        products |= found
        for branch, left in rest.items():
            own = [a for a, owner in inner.items() if owner == branch]
            _check_sum([left, *(_rows(found[a]) for a in own)], parts[branch], f"{branch}: is not linear in {', '.join(own)}")
    for target in targets:
        x, owner = products[target.address], inner.get(target.address, target.address)
        for one, site in each_index(target, run, ctx.layout):
            mask = site.mask(x)
            if one.key not in parts:
                parts[one.key] = _rows(x if mask is None else torch.where(mask, x, 0))
                parts[owner] = parts[owner] - parts[one.key]
    return Attribution({**parts, "bias": bias}, total)


def _rows(x: Tensor) -> Tensor:
    return x.flatten(1).sum(1)


def _row_metric(metric: Wanted, layout: TokenLayout) -> RowMetric:
    """A metric of the logits (rows,); of token ids, their logits at the last token of each row."""
    if callable(metric):
        return metric
    last = torch.where(layout.real, layout.order, -1).argmax(-1)
    ids = metric if isinstance(metric, tuple) else (metric,)

    def of(logits: Tensor) -> Tensor:
        at = logits[torch.arange(len(logits), device=logits.device), last]
        return at[:, ids[0]] - at[:, ids[1]] if len(ids) == 2 else at[:, ids[0]]

    return of


def _slices(spec: Model, by: str | Sequence[str]) -> list[str]:
    """The addresses that `by` names."""
    if not isinstance(by, str) or by not in AXIS:
        return [by] if isinstance(by, str) else list(by)
    found: list[str] = []
    for path, part, scope in walk(spec):
        axes = part.taps(scope) if path.startswith("layers.") else {}
        mixes = isinstance(part, Mixer)
        per_head = [name for name, each in axes.items() if each == "pos head channel"][-1:]  # what the heads return
        per_choice = [name for name, each in axes.items() if each == "pos choice channel"]
        values = [part.values] if mixes and part.values in axes else []
        names = {"head": per_head if mixes else [], "expert": per_choice, "token": values}[by]
        found += [f"{path}.{name}[{AXIS[by]}]" for name in names]
    if not found:
        raise SpecError("layers", f"no branch of this model has activations per {by}", 'use by="component"')
    return found


def _branch(target: Target, leaves: Sequence[str]) -> str:
    """The address of what the branch of an activation adds to the residual stream."""
    add = ".".join(target.address.split(".")[:3]) + "_add"
    if add not in leaves:
        raise SpecError(target.key, "is not in a branch of a layer", f"branches add {', '.join(leaves[1:4])} …")
    return add


def _given(spec: Model, inner: Mapping[str, str]) -> list[str]:
    """The activations that stay as they are where values are attributed to: they decide how the values are mixed."""
    found: list[str] = []
    for path, part, scope in walk(spec):
        if isinstance(part, Mixer) and part.values and f"{path}.{part.values}" in inner:
            names = [name for name in part.taps(scope) if name != part.values]
            found += [f"{path}.{name}" for name in (["pattern"] if "pattern" in names else names[: names.index("y")])]
    return found


def _weights(
    model: ModelModule,
    tokens: Tensor,
    ctx: Ctx,
    values: Mapping[str, Tensor],
    frozen: Mapping[str, Replacement],
    metric: RowMetric,
    total: Tensor,
) -> tuple[dict[str, Tensor], Tensor]:
    """The mean gradient of the metric at each value on the way from zero, and the metric at zero."""

    def at(by: float) -> tuple[Tensor, list[Tensor]]:
        points = {a: (x * by).requires_grad_() for a, x in values.items()}
        with torch.enable_grad():
            out = metric(listened(model, tokens, Tracer(model.part, None, {**frozen, **points}), ctx))
            if out.shape != total.shape or out.dim() != 1:
                raise InputError(f"metric: returns the shape {tuple(out.shape)}; return one number per row")
            grads = torch.autograd.grad(out.sum(), list(points.values()), allow_unused=True)
        return out.detach(), [torch.zeros_like(x) if g is None else g for x, g in zip(points.values(), grads, strict=True)]

    bias, sums, weights = at(0.0)[0], list[Tensor](), dict[str, Tensor]()
    for nodes in NODES:
        weights = {a: torch.zeros_like(x) for a, x in values.items()}
        for node, share in zip(*np.polynomial.legendre.leggauss(nodes), strict=True):
            for mean, grad in zip(weights.values(), at(float(node + 1) / 2)[1], strict=True):
                mean += share / 2 * grad
        sums = [bias, *(_rows(x * weights[a]) for a, x in values.items())]
        if _gap(sums, total) is None:
            return weights, bias
    _check_sum(sums, total, "metric: is not smooth in the residual stream")
    return weights, bias


def _inside(
    model: ModelModule,
    tokens: Tensor,
    ctx: Ctx,
    values: Mapping[str, Tensor],
    branches: Mapping[str, Tensor],
    frozen: Mapping[str, Replacement],
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Each value times its weight in what its branch adds, and what is added without those values; `branches` are the weights
    of what branches add."""

    def at(by: float) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        points = {a: (x * by).requires_grad_() for a, x in values.items()}
        tracer = Tracer(model.part, Trace(*branches), {**frozen, **points}, grad=True)
        with torch.enable_grad():
            listened(model, tokens, tracer, ctx)
            added = tracer.end()
            return points, {a: _rows(added[a] * weight) for a, weight in branches.items()}

    points, sums = at(1.0)
    grads = torch.autograd.grad(torch.stack(list(sums.values())).sum(), list(points.values()), allow_unused=True)
    found: dict[str, Tensor] = {}
    for (a, x), grad in zip(values.items(), grads, strict=True):
        if grad is None:
            raise InputError(f"{a}: does not reach what its branch adds (another address of `by` comes after it)")
        found[a] = x * grad
    return found, {a: x.detach() for a, x in at(0.0)[1].items()}


def _gap(parts: Sequence[Tensor], total: Tensor) -> float | None:
    """By how much parts miss their total; None where that is rounding."""
    every = torch.stack(list(parts))
    gap, allowed = (every.sum(0) - total).abs(), min(max(1e-10, 1e4 * torch.finfo(total.dtype).eps), 0.05)
    return None if bool((gap <= allowed * every.abs().sum(0).clamp_min(1e-30)).all()) else float(gap.max())


def _check_sum(parts: Sequence[Tensor], total: Tensor, what: str) -> None:
    if (gap := _gap(parts, total)) is not None:
        raise InputError(f"{what}: its attributions miss {gap:.3g} of it (use dt.look.integrated_gradients, or another `by`)")
