"""Linear probes: what can be read off an activation, on held-out rows, and whether the probe could have memorized it.

    logits = W x + b                          W, b minimize cross-entropy + λ/2 ‖W‖² on standardized x (convex, L-BFGS)
    selectivity = accuracy − accuracy of the control task

The control task gives each type (a token id, by default) a random label of the same distribution: a probe that reads it from
the activation has memorized types, so what it says of the real labels is its own capacity. Alain & Bengio 2016; Hewitt & Liang
2019.

    probes = probe(model, ids, labels, "layers.*.in")                  ids, labels (rows, n); −100: not probed
    probes["layers.2.in"].selectivity, .direction(1, 0)
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.base.errors import InputError
from dovetail.look.address import resolve
from dovetail.look.intervention import Replacement
from dovetail.look.tracer import remaining_axes, trace
from dovetail.model.model import ModelModule
from dovetail.nn.loss import IGNORED


@dc.dataclass(frozen=True)
class Probe:
    """A linear probe and how well it does on rows that it was not fitted on."""

    accuracy: float
    control: float  # accuracy of a probe of the same form on random labels per type
    majority: float  # accuracy of always answering the most frequent label of the fitted rows
    tokens: int  # held out
    weight: Tensor = dc.field(repr=False)  # (classes, features), in the unit of the activation
    bias: Tensor = dc.field(repr=False)  # (classes,)

    @property
    def selectivity(self) -> float:
        """Accuracy minus that of the control task."""
        return self.accuracy - self.control

    def __call__(self, x: Tensor) -> Tensor:
        """The logits (…, classes) of activations (…, features)."""
        return x.to(self.weight) @ self.weight.T + self.bias

    def direction(self, label: int, against: int) -> Tensor:
        """(features,) the direction from one label to another, for `steer` and `project_out`."""
        return self.weight[label] - self.weight[against]


def probe(
    model: ModelModule,
    ids: Tensor,
    labels: Tensor,
    over: str | Sequence[str],
    *,
    types: Tensor | None = None,
    held_out: float = 0.25,
    decay: float = 1e-3,
    batch: int = 64,
    seed: int = 0,
    patch: Mapping[str, Replacement] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Probe]:
    """Fit a probe of the labels (rows, n), from 0, at each address of `over`; −100 leaves a token out. Whole rows are held out.
    `types` (rows, n) are those of the control task; None: the token ids."""
    types = ids if types is None else types
    for name, given in (("labels", labels), ("types", types)):
        if given.shape != ids.shape:
            raise InputError(f"{name}: have the shape {tuple(given.shape)}, ids {tuple(ids.shape)}; give one for each token")
    order = torch.randperm(len(ids), generator=(draw := torch.Generator().manual_seed(seed)))
    test = torch.zeros(len(ids), dtype=torch.bool)
    test[order[: round(held_out * len(ids))]] = True
    meant = labels.cpu() != IGNORED
    y, held, types = labels.cpu()[meant], test[:, None].expand_as(meant)[meant], types.cpu()[meant]
    if len(y[~held].unique()) < 2 or not held.any():
        raise InputError("labels: the fitted rows need two classes, and some rows are held out; give more rows")
    kinds, of_kind = types.unique(return_inverse=True)
    control = y[torch.randint(len(y), (len(kinds),), generator=draw)][of_kind]
    majority = float((y[held] == y[~held].mode().values).float().mean())
    targets = {target.key: target for target in resolve(model.part, [over] if isinstance(over, str) else over)}
    if of_rows := [key for key, target in targets.items() if "row" in target.picks]:
        raise InputError(f"{of_rows[0]}: a probe has rows of its own to fit and to test; give only these rows")
    inputs: dict[str, list[Tensor]] = {key: [] for key in targets}
    for start in range(0, len(ids), batch):
        run = trace(model, ids[start : start + batch], *targets, patch=patch)
        for key, target in targets.items():
            axes, x = remaining_axes(target), run[key]
            if "pos" not in axes or "pos" in target.picks:
                raise InputError(f"{key}: a probe needs a value for each token; set labels to −100 where it should not look")
            x = x.movedim(axes.index("pos") - len(axes), 1).flatten(2)
            inputs[key].append(x[meant[start : start + batch]].to(torch.float32))
    probes: dict[str, Probe] = {}
    for key in targets:
        x = torch.cat(inputs.pop(key))
        weight, bias = _fitted(x[~held], y[~held], decay)
        of_control = _fitted(x[~held], control[~held], decay)
        accuracy = _accuracy(x[held], y[held], weight, bias)
        by_chance = _accuracy(x[held], control[held], *of_control)
        probes[key] = Probe(accuracy, by_chance, majority, int(held.sum()), weight, bias)
        if progress is not None:
            progress(len(probes), len(targets))
    return probes


def _fitted(x: Tensor, y: Tensor, decay: float) -> tuple[Tensor, Tensor]:
    """Weight (classes, features) and bias (classes,) of the logistic regression of y (tokens,) on x (tokens, features)."""
    y, mean, std = y.to(x.device), x.mean(0), x.std(0, correction=0).clamp_min(1e-6)
    x, classes = (x - mean) / std, int(y.max()) + 1
    weight, bias = (x.new_zeros(shape, requires_grad=True) for shape in ((classes, x.shape[-1]), (classes,)))
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=300, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(x @ weight.T + bias, y) + decay / 2 * weight.square().sum()
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(closure)  # pyright: ignore[reportArgumentType]  torch declares that a closure returns a float
    scaled = weight.detach() / std
    return scaled, bias.detach() - scaled @ mean


def _accuracy(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor) -> float:
    return float(((x @ weight.T + bias).argmax(-1) == y.to(x.device)).float().mean())
