"""Sweeps: one intervention after another over many activations, and what each does to a metric.

    sweep(model, clean, corrupt, over="layers.*.resid[pos]", metric=m)     activation patching: clean values in the corrupt run
    ablate(model, ids, over="layers.*.mixer.z[head]", metric=m)            a number (0) or an intervention at each, in turn
    skip_layers(model, ids, metric=m)                                      each layer as the identity
    path_patching(model, clean, corrupt, "layers.0.mixer.z[head=1]", ["layers.2.mixer.q"], metric=m)
    attribution_patching(model, clean, corrupt, over=…, metric=m)          a first-order estimate of `sweep`, in two passes

An axis without a value (`[pos]`, `[head]`, `[expert]`) is swept: one intervention per index. The interventions of a layer are
the rows of one batch, and the layers before it are computed once.

    effect = (m(patched) − m(corrupt)) / (m(clean) − m(corrupt))           1: the patch restores the clean answer; 0: nothing

Meng et al. 2022; Wang et al. 2022 (path patching); Nanda 2023 (attribution patching).
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby, product

import torch
from torch import Tensor

from dovetail.core.errors import InputError
from dovetail.core.inputs import default_ctx
from dovetail.core.layout import TokenLayout
from dovetail.look.address import Pick, Target, resolve
from dovetail.look.intervention import Intervention, Replacement, from_run
from dovetail.look.record import Trace
from dovetail.look.site import Site
from dovetail.look.tracer import Tracer, listened, trace
from dovetail.model import ModelModule

RowMetric = Callable[[Tensor], Tensor]  # logits (rows, n, vocab) -> (rows,)
Progress = Callable[[int, int], None]  # interventions done, of how many
BATCH = 64  # interventions per forward pass


@dc.dataclass(frozen=True)
class Sweep:
    """The metric after each intervention, by its address and slice."""

    metric: dict[str, float]
    clean: float  # of the run that values come from; of an ablation, of the run itself
    corrupt: float  # of the run that is patched
    estimated: bool = False  # whether it is a first-order estimate

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
        return "\n".join(
            [f"clean {self.clean:.4g}, corrupt {self.corrupt:.4g}; {what} of each intervention, largest first", *lines, *more]
        )


def sweep(
    model: ModelModule,
    clean: Tensor,
    corrupt: Tensor,
    over: str | Sequence[str],
    metric: RowMetric,
    *,
    patch: Mapping[str, Replacement] | None = None,
    batch: int = BATCH,
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
    results, base = _interventions(model, corrupt, targets, from_run(run), metric, patch, batch, progress, run)
    return Sweep(results, float(metric(run["head.logits"]).mean()), base)


def ablate(
    model: ModelModule,
    inputs: Tensor,
    over: str | Sequence[str],
    metric: RowMetric,
    *,
    value: Replacement = 0.0,
    patch: Mapping[str, Replacement] | None = None,
    batch: int = BATCH,
    progress: Progress | None = None,
) -> Sweep:
    """Replace each activation of `over` by a value (0, `mean_of(run)`, `resample(run)`, `noise()` …), in turn. An effect is the
    change of the metric."""
    targets = resolve(model.part, [over] if isinstance(over, str) else over)
    run = trace(model, inputs, *{target.address for target in targets}, "head.logits", patch=patch)
    results, base = _interventions(model, inputs, targets, value, metric, patch, batch, progress, run)
    return Sweep(results, base, base)


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
    there = trace(model, corrupt, *names, "head.logits", grad=True)
    values = metric(there["head.logits"])
    grads = torch.autograd.grad(values.mean(), [there[name] for name in names], allow_unused=True)
    base, layout = float(values.detach().mean()), default_ctx(corrupt, ranks=model.ranks).layout
    results: dict[str, float] = {}
    for name, grad in zip(names, grads, strict=True):
        x = there[name].detach()
        weighted = torch.zeros_like(x) if grad is None else (source[name] - x) * grad
        for target in targets:
            for one in each_index(target, x) if target.address == name else ():
                mask = site_of(one, layout).mask(x)
                results[one.key] = base + float((weighted if mask is None else torch.where(mask, weighted, 0)).sum())
    return Sweep(results, float(metric(source["head.logits"]).mean()), base, estimated=True)


# -- one intervention per row -----------------------------------------------------------------------------------------


def each_index(target: Target, x: Tensor, experts: int = 0) -> Iterator[Target]:
    """The targets of a swept one: an index for each axis without a value."""
    free = [axis for axis, pick in target.picks.items() if pick is None]
    back = {axis: i - len(target.axes) for i, axis in enumerate(target.axes)}
    sizes = [x.shape[back[axis]] if axis in back else experts for axis in free]
    for indices in product(*map(range, sizes)):
        picks: dict[str, Pick] = {**target.picks, **dict(zip(free, indices, strict=True))}
        yield target._replace(picks=picks)


def site_of(target: Target, layout: TokenLayout) -> Site:
    """The place of a target in a whole pass."""
    return Site(target, layout, 0, layout.order.amax(-1) + 1)


def _layer(address: str) -> int:
    """The layer of an address; −1 before the first, a large number after the last."""
    first, _, rest = address.partition(".")
    if first == "layers":
        return int(rest.partition(".")[0])
    return 10**9 if first in ("normed", "norm", "head") else -1


def _interventions(
    model: ModelModule,
    inputs: Tensor,
    targets: Sequence[Target],
    value: Replacement,
    metric: RowMetric,
    patch: Mapping[str, Replacement] | None,
    batch: int,
    progress: Progress | None,
    run: Trace,
) -> tuple[dict[str, float], float]:
    """The metric after each intervention by its key, and without any."""
    every = [one for target in targets for one in each_index(target, run[target.address], experts_of(model, target))]
    base, results = _metric_of(model, inputs, {}, metric, patch), dict[str, float]()
    for layer, group in groupby(sorted(every, key=lambda one: _layer(one.address)), key=lambda one: _layer(one.address)):
        members, resumed = list(group), _Resumed(model, inputs, patch, layer)
        for begin in range(0, len(members), batch):
            some = members[begin : begin + batch]
            values = metric(resumed.run(some, value)).view(len(some), -1).mean(1)
            results |= {one.key: float(number) for one, number in zip(some, values, strict=True)}
            if progress is not None:
                progress(len(results), len(every))
    return {one.key: results[one.key] for one in every}, base


def experts_of(model: ModelModule, target: Target) -> int:
    """The number of experts, where an activation per choice is swept over them."""
    if target.picks.get("expert", 0) is not None or "expert" in target.axes:
        return 0
    return int(model.get_submodule(target.experts).part.experts)  # type: ignore[union-attr]


class _Resumed:
    """A run from one layer on: the residual stream before it is computed once. A model whose layers read values of earlier
    ones, or an intervention before the first layer, runs as a whole."""

    def __init__(self, model: ModelModule, inputs: Tensor, patch: Mapping[str, Replacement] | None, layer: int) -> None:
        self.model, self.inputs, self.patch, self.rows = model, inputs, dict(patch or {}), len(inputs)
        self.layer = min(layer, len(model.layers))
        self.whole = layer < 0 or any(block.io is not None for block in model.layers) or model.part.head is None
        self.stream: Tensor | None = None
        if not self.whole:
            ctx = default_ctx(inputs, ranks=model.ranks)
            ctx.taps = Tracer(model.part, None, patch) if patch else None
            with torch.no_grad():
                x, _, ctx = model.begin(inputs, ctx)
                self.stream = model.run_layers(x, ctx, {}, range(self.layer))

    def run(self, targets: Sequence[Target], value: Replacement) -> Tensor:
        """The logits (targets · rows, n, …) with one target patched in each group of rows."""
        count = len(targets)
        inputs = self.inputs.repeat(count, *[1] * (self.inputs.dim() - 1))
        tracer = Tracer(self.model.part, None, {**self.patch, **self._in_rows(targets, value)})
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            if self.stream is None:
                return listened(self.model, inputs, tracer)
            ctx = dc.replace(default_ctx(inputs, ranks=self.model.ranks), taps=tracer)
            x = self.stream.repeat(count, *[1] * (self.stream.dim() - 1))
            x = self.model.run_layers(x, ctx, {}, range(self.layer, len(self.model.layers)))
            return self.model.head(self.model.end(x, ctx), ctx)

    def _in_rows(self, targets: Sequence[Target], value: Replacement) -> dict[str, Replacement]:
        patch: dict[str, Replacement] = {}
        for i, target in enumerate(targets):
            rows = slice(i * self.rows, (i + 1) * self.rows)
            patch[target._replace(picks={**target.picks, "row": rows}).key] = InRows(value)
        return patch


class InRows:
    """An intervention on some rows of a larger batch, as if they were all."""

    def __init__(self, value: Replacement) -> None:
        self.value = value

    def at(self, x: Tensor, site: Site) -> Tensor:
        """The value of these rows."""
        if isinstance(self.value, Intervention):
            return self.value.at(x, dc.replace(site, rows=None))
        new = torch.as_tensor(self.value(x) if callable(self.value) else self.value, dtype=x.dtype, device=x.device)
        return new.expand(x.shape)


def _metric_of(
    model: ModelModule,
    inputs: Tensor,
    patch: Mapping[str, Replacement],
    metric: RowMetric,
    held: Mapping[str, Replacement] | None = None,
) -> float:
    with torch.no_grad():
        return float(metric(listened(model, inputs, Tracer(model.part, None, {**(held or {}), **patch}))).mean())
