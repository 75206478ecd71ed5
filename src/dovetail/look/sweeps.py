"""Sweeps: one intervention after another over many activations, and what each does to a metric.

    sweep(model, clean, corrupt, over="layers.*.resid[pos]", metric=m)     activation patching: clean values in the corrupt run
    ablate(model, ids, over="layers.*.mixer.z[head]", metric=m)            a number (0) or an intervention at each, in turn
    skip_layers(model, ids, metric=m)                                      each layer as the identity
    path_patching(model, clean, corrupt, "layers.0.mixer.z[head=1]", ["layers.2.mixer.q"], metric=m)
    attribution_patching(model, clean, corrupt, over=…, metric=m)          a first-order estimate of `sweep`, in two passes

An axis without a value (`[pos]`, `[head]`, `[expert]`) is swept: one intervention per index. The interventions of a layer are
the rows of one batch; the layers and, in a causal model, the tokens before them are computed once (`look/resumed.py`). The
result says how much was computed (`Sweep.work`).

    effect = (m(patched) − m(corrupt)) / (m(clean) − m(corrupt))           1: the patch restores the clean answer; 0: nothing

Meng et al. 2022; Wang et al. 2022 (path patching); Nanda 2023 (attribution patching).
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product

import torch
from torch import Tensor

from dovetail.base.errors import InputError
from dovetail.look.address import Pick, Target, resolve
from dovetail.look.intervention import Replacement, from_run
from dovetail.look.record import Trace
from dovetail.look.resumed import Resumed, SweepCost
from dovetail.look.site import NOTHING, Site
from dovetail.look.tracer import Tracer, listened, trace
from dovetail.model.model import ModelModule
from dovetail.nn.inputs import default_ctx
from dovetail.nn.layout import TokenLayout

RowMetric = Callable[[Tensor], Tensor]  # logits (rows, n, vocab) -> (rows,)
Progress = Callable[[int, int], None]  # interventions done, of how many


@dc.dataclass(frozen=True)
class Sweep:
    """The metric after each intervention, by its address and slice."""

    metric: dict[str, float]
    clean: float  # of the run that values come from; of an ablation, of the run itself
    corrupt: float  # of the run that is patched
    estimated: bool = False  # whether it is a first-order estimate
    work: SweepCost | None = None  # what was computed, of a sweep that patches one activation after the other

    def effects(self) -> dict[str, float]:
        """How much of the difference between both runs each intervention restores; of an ablation, the change of the metric."""
        whole = self.clean - self.corrupt
        return {key: (value - self.corrupt) / (whole or 1.0) for key, value in self.metric.items()}

    def table(self) -> tuple[list[str], Tensor]:
        """The addresses, and (addresses, indices) the effects: a row per address where each has equally many."""
        rows: dict[str, list[float]] = {}
        for key, effect in self.effects().items():
            rows.setdefault(key.partition("[")[0], []).append(effect)
        if len({len(row) for row in rows.values()}) > 1:
            raise InputError("table: the addresses have different numbers of indices; use effects()")
        return list(rows), torch.tensor(list(rows.values()))

    def error(self, exact: Sweep) -> float:
        """The root of the mean squared error of these effects, over that of the exact ones: how far an estimate is off."""
        mine, theirs = self.effects(), exact.effects()
        gap = torch.tensor([mine[key] - theirs[key] for key in theirs])
        return float(gap.square().mean().sqrt() / torch.tensor(list(theirs.values())).square().mean().sqrt().clamp_min(1e-30))

    def __repr__(self) -> str:
        ordered = sorted(self.effects().items(), key=lambda item: -abs(item[1]))
        lines = [f"{key:48}  {effect:+.3f}" for key, effect in ordered[:20]]
        more = [f"… and {len(ordered) - 20} more"] if len(ordered) > 20 else []
        what = "estimated effect" if self.estimated else "effect"
        first = f"clean {self.clean:.4g}, corrupt {self.corrupt:.4g}; {what} of each intervention, largest first"
        return "\n".join([first, *lines, *more, *([] if self.work is None else [repr(self.work)])])


def sweep(
    model: ModelModule,
    clean: Tensor,
    corrupt: Tensor,
    over: str | Sequence[str],
    metric: RowMetric,
    *,
    patch: Mapping[str, Replacement] | None = None,
    batch: int | None = None,
    progress: Progress | None = None,
) -> Sweep:
    """Patch each activation of `over` in the run on `corrupt` (rows, n) with its value in the run on `clean` (rows, n), in
    turn. The metric of an intervention is the mean over rows. `patch` holds in every run, such as `freeze(…)`."""
    if clean.shape != corrupt.shape:
        raise InputError(
            f"corrupt: has the shape {tuple(corrupt.shape)}, clean {tuple(clean.shape)}; positions must correspond"
        )
    targets = resolve(model.part, [over] if isinstance(over, str) else over)
    run = trace(model, clean, *{target.address for target in targets}, "head.logits", patch=patch)
    same = (clean == corrupt).flatten(2).all(-1) if clean.dim() > 2 else clean == corrupt
    agrees = int(same.all(0).int().cumprod(0).sum())  # tokens that both runs begin with
    value = from_run(run)
    results, base, work = _interventions(model, corrupt, targets, value, metric, patch, batch, progress, run, agrees)
    return Sweep(results, float(metric(run["head.logits"]).mean()), base, work=work)


def ablate(
    model: ModelModule,
    inputs: Tensor,
    over: str | Sequence[str],
    metric: RowMetric,
    *,
    value: Replacement = 0.0,
    patch: Mapping[str, Replacement] | None = None,
    batch: int | None = None,
    progress: Progress | None = None,
) -> Sweep:
    """Replace each activation of `over` by a value (0, `mean_of(run)`, `resample(run)`, `noise()` …), in turn. An effect is the
    change of the metric."""
    targets = resolve(model.part, [over] if isinstance(over, str) else over)
    run = trace(model, inputs, *{target.address for target in targets}, "head.logits", patch=patch)
    results, base, work = _interventions(model, inputs, targets, value, metric, patch, batch, progress, run)
    return Sweep(results, base, base, work=work)


def skip_layers(model: ModelModule, inputs: Tensor, metric: RowMetric) -> Sweep:
    """Make each layer the identity: what it returns is what it read."""
    run = trace(model, inputs, "layers.*.in", "head.logits")
    results: dict[str, float] = {}
    for i, block in enumerate(model.part.layers):
        last = f"layers.{i}.after_{block.steps()[-1][0]}"
        results[f"layers.{i}"] = _metric_of(model, inputs, {last: run[f"layers.{i}.in"]}, metric)
    base = float(metric(run["head.logits"]).mean())
    return Sweep(results, base, base)


def path_patching(
    model: ModelModule, clean: Tensor, corrupt: Tensor, sender: str, receivers: Sequence[str], metric: RowMetric
) -> Sweep:
    """Patch a sender with its clean value along the direct paths to the receivers: everything that is added to the residual
    stream between them stays as in the corrupt run, but for the sender's own branch."""
    senders, receiving = resolve(model.part, [sender]), resolve(model.part, receivers)
    source = trace(model, clean, *{target.address for target in senders}, "head.logits")
    own = tuple(t.address for t in senders)
    adds = [target.address for target in resolve(model.part, ["layers.*_add"])]
    added = [a for a in adds if a not in own and not any(name.startswith(a.removesuffix("_add") + ".") for name in own)]
    before = trace(model, corrupt, *added, "head.logits")
    held: dict[str, Replacement] = {address: from_run(before) for address in added}
    arrived = trace(
        model, corrupt, *{t.address for t in receiving}, patch={**held, **{t.key: from_run(source) for t in senders}}
    )
    patched = _metric_of(model, corrupt, {t.key: from_run(arrived) for t in receiving}, metric)
    key = f"{sender} -> {', '.join(receivers)}"
    return Sweep({key: patched}, float(metric(source["head.logits"]).mean()), float(metric(before["head.logits"]).mean()))


def attribution_patching(
    model: ModelModule, clean: Tensor, corrupt: Tensor, over: str | Sequence[str], metric: RowMetric
) -> Sweep:
    """Estimate `sweep` from the gradients of the corrupt run: m(patched) ≈ m(corrupt) + Σ (x_clean − x_corrupt) ∂m/∂x."""
    targets = resolve(model.part, [over] if isinstance(over, str) else over)
    names = list(dict.fromkeys(target.address for target in targets))
    source = trace(model, clean, *names, "head.logits")
    chosen = {target.choices for target in targets} - {""}
    there = trace(model, corrupt, *names, *chosen, "head.logits", grad=True)
    values = metric(there["head.logits"])
    grads = torch.autograd.grad(values.mean(), [there[name] for name in names], allow_unused=True)
    base, layout = float(values.detach().mean()), default_ctx(corrupt, ranks=model.ranks).layout
    results: dict[str, float] = {}
    for name, grad in zip(names, grads, strict=True):
        x = there[name].detach()
        weighted = torch.zeros_like(x) if grad is None else (source[name] - x) * grad
        for target in targets:
            for one, site in each_index(target, there, layout) if target.address == name else ():
                mask = site.mask(x)
                results[one.key] = base + float((weighted if mask is None else torch.where(mask, weighted, 0)).sum())
    return Sweep(results, float(metric(source["head.logits"]).mean()), base, estimated=True)


# -- one intervention per row -----------------------------------------------------------------------------------------


def each_index(target: Target, run: Trace, layout: TokenLayout) -> Iterator[tuple[Target, Site]]:
    """The targets of a swept one, an index for each axis without a value, and their places in a full forward pass; InputError
    for one that the run, which has recorded the address as a whole, has no value for."""
    x = run[target.address]
    sizes = {axis: x.shape[i - len(target.axes)] for i, axis in enumerate(target.axes)}
    sizes = {"row": len(x), "expert": target.experts, **sizes}
    free = [axis for axis, pick in target.picks.items() if pick is None]
    if unknown := [axis for axis in free if axis not in sizes]:
        raise InputError(f"{target.key}: a full forward pass has one {unknown[0]} of it; leave {unknown[0]} out")
    for indices in product(*(range(sizes[axis]) for axis in free)):
        picks: dict[str, Pick] = {**target.picks, **dict(zip(free, indices, strict=True))}
        one = target._replace(picks=picks)
        site = Site(one, layout, 0, layout.order.amax(-1) + 1, run.get(one.choices))
        if missing := site.missing(x):
            raise InputError(f"{missing}: {NOTHING}")
        yield one, site


def _interventions(
    model: ModelModule,
    inputs: Tensor,
    targets: Sequence[Target],
    value: Replacement,
    metric: RowMetric,
    patch: Mapping[str, Replacement] | None,
    batch: int | None,
    progress: Progress | None,
    run: Trace,
    agrees: int = 0,
) -> tuple[dict[str, float], float, SweepCost]:
    """The metric after each intervention by its key, without any, and what was computed."""
    layout = default_ctx(inputs, ranks=model.ranks).layout
    every = [one for target in targets for one, _ in each_index(target, run, layout)]
    resumed, results = Resumed(model, inputs, patch, every, value, agrees), dict[str, float]()
    base = float(metric(resumed.logits).mean())
    for some, logits in resumed.batches(batch):
        values = metric(logits).view(len(some), -1).mean(1)
        results |= {one.key: float(number) for one, number in zip(some, values, strict=True)}
        if progress is not None:
            progress(len(results), len(every))
    return {one.key: results[one.key] for one in every}, base, resumed.work()


def _metric_of(
    model: ModelModule,
    inputs: Tensor,
    patch: Mapping[str, Replacement],
    metric: RowMetric,
    held: Mapping[str, Replacement] | None = None,
) -> float:
    tracer = Tracer(model.part, None, {**(held or {}), **patch})
    with torch.no_grad():
        value = float(metric(listened(model, inputs, tracer)).mean())
    tracer.end()  # raises for an address that the run has no value for
    return value
