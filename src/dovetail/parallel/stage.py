"""A stage of a pipeline: some layers of a model, with what comes before the first and after the last of them.

    stage 0: embed, layers 0 … 5        stage 1: layers 6 … 12        stage 2: layers 13 … 18, norm, head

Layers are cut so that the largest stage has as few weights that tokens are multiplied by as possible. Blocks take what they
read of earlier layers as inputs (nn/cross_layer.py), so a cut knows what to send beside the residual stream: the values that
a layer behind it reads and one before it published. Token ids are not sent: every rank reads them.

A stage is the whole model with other stages' modules left out, so its weights have the paths that they have in the whole, and
a checkpoint is that of any other layout.                                                             Huang et al. 2019 (GPipe)
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Iterator
from itertools import pairwise
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from dovetail.base.errors import SpecError
from dovetail.model.model import Model, ModelModule
from dovetail.nn.ctx import Ctx
from dovetail.nn.declared_tensors import Absent
from dovetail.nn.loss import IGNORED
from dovetail.spec.fold import declared

END = ("norm", "head")  # what comes after the last layer
UNSENT = "inputs"  # token ids, which every rank has
REMEDY = "train without --pipeline"


@dc.dataclass(frozen=True)
class LayerStage:
    """One stage of a pipeline, and its layers."""

    index: int
    count: int
    layers: range

    @property
    def first(self) -> bool:
        """Whether it has the embedding."""
        return self.index == 0

    @property
    def last(self) -> bool:
        """Whether it has the head."""
        return self.index == self.count - 1

    @staticmethod
    def of(spec: Model, index: int, count: int) -> LayerStage:
        """The stage of a spec; raise SpecError where the spec cannot be cut into so many."""
        return LayerStage(index, count, cut_layers(spec, count)[index])


def cut_layers(spec: Model, count: int) -> list[range]:
    """The layers of each stage; raise SpecError, with a path, where the spec cannot be cut."""
    if len(spec.layers) < count:
        raise SpecError("layers", f"{len(spec.layers)} layers cannot be cut into {count} stages", "use fewer stages")
    if spec.encoder is not None:
        raise SpecError("encoder", "a pipeline has one stack of layers, and every decoder layer reads the encoder", REMEDY)
    if spec.mtp:
        raise SpecError("mtp", "the stages of a pipeline do not compute multi-token prediction", REMEDY)
    if not spec.embed.causal():
        raise SpecError("embed", f"{spec.embed.kind} makes another number of tokens, which later stages do not see", REMEDY)
    ends = _balanced(_costs(spec), count)
    cuts = [range(a, b) for a, b in pairwise([0, *ends])]
    for d in declared(spec):
        other = d.weight.same_as
        if other is not None and stage_of(d.path, cuts) != stage_of(other, cuts):
            where = f"is the same weight as {other}, which is on another stage of {count}"
            raise SpecError(d.path, where, "untie them (--set head.tied=false), or use fewer stages")
    return cuts


def stage_of(path: str, cuts: list[range]) -> int:
    """The stage that has the module or tensor at a path."""
    name, _, rest = path.partition(".")
    if name == "layers":
        layer = int(rest.partition(".")[0])
        return next(i for i, layers in enumerate(cuts) if layer in layers)
    return len(cuts) - 1 if name in END else 0


def _costs(spec: Model) -> list[int]:
    """Per layer the weights that a token is multiplied by; the last has those of the head, too."""
    costs = [1] * len(spec.layers)
    for d in declared(spec):
        name, _, rest = d.path.partition(".")
        if d.weight.matmul and name in ("layers", "head"):
            costs[int(rest.partition(".")[0]) if name == "layers" else -1] += int(d.size * d.weight.used)
    return costs


def _balanced(costs: list[int], count: int) -> tuple[int, ...]:
    """The ends of `count` runs of costs, none of them empty, the largest sum of which is as small as possible."""
    sums = [0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    best = {i: (sums[i], (i,)) for i in range(1, len(costs) + 1)}  # of the first i layers in one stage
    for stages in range(2, count + 1):
        best = {
            i: min((max(best[j][0], sums[i] - sums[j]), (*best[j][1], i)) for j in range(stages - 1, i))
            for i in range(stages, len(costs) + 1)
        }
    return best[len(costs)][1]


def keep_stage(model: ModelModule, stage: LayerStage) -> None:
    """Leave out, in place, what other stages have; the forward pass of the model is then that of the stage."""
    before, after = (crossing(model, end) for end in (stage.layers.start, stage.layers.stop))
    for name in [name for name, _ in model.named_children() if name != "layers"]:
        if not (stage.last if name in END else stage.first):
            setattr(model, name, Absent())
    for i in range(len(model.layers)):
        if i not in stage.layers:
            model.layers[i] = Absent()
    model.forward = MethodType(_forward, model)
    model.stage, model.before, model.after = stage, before, after  # type: ignore[assignment]


def crossing(model: ModelModule, layer: int) -> list[tuple[str, str]]:
    """(source, name) of the values that the residual stream takes along where it is cut before a layer."""
    published = {f"{model.path}.layers.{i}".lstrip(".") for i in range(layer)}
    return sorted({key for key in _reads(model, layer) if key[0] == model.path or key[0].rpartition(".")[0] in published})


def _reads(model: ModelModule, layer: int) -> Iterator[tuple[str, str]]:
    """(source, name) of what the layers from this one on read; token ids left out."""
    for block in model.layers[layer:]:
        for _, read in () if block.io is None else block.io.reads:
            if (read.source, read.name) != (model.path, UNSENT):
                yield read.source, read.name


def _forward(self: Any, *given: Tensor, tokens: Tensor, labels: Tensor, ctx: Ctx, hits: bool = False) -> Any:
    """The stage of a forward pass on tokens (batch, n): from what the stage before sent to what the next receives; of the last
    one, the loss summed over labels, their number, and with `hits` how many of them are the most probable answer."""
    stage: LayerStage = self.stage
    if stage.first:
        x, _, ctx = self.begin(tokens, ctx)
        carried = self.carried(tokens, x)
    else:
        x, *values = given
        carried = {(self.path, UNSENT): tokens, **dict(zip(self.before, values, strict=True))}
    x = self.run_layers(x, ctx, carried, stage.layers)
    added = added_loss(ctx, labels)
    if not stage.last:
        return (x if added is None else _add_loss(x, added)), *(carried[key] for key in self.after)
    x = self.end(x, ctx)
    loss = self.head.loss(x, labels, ctx)
    found = [loss.sum if added is None else loss.sum + added, loss.num_labels.to(loss.sum.dtype)]
    if hits:
        found.append(self.hits(x, labels, ctx).to(loss.sum.dtype))
    return torch.stack(found)


def added_loss(ctx: Ctx, labels: Tensor) -> Tensor | None:
    """The losses that the parts of this stage added, weighted by the number of labels; None where they added none."""
    added = ctx.added()
    return None if added is None else added * (labels != IGNORED).sum()


def _add_loss(x: Tensor, loss: Tensor) -> Tensor:
    return _AddLoss.apply(x, loss)  # type: ignore[no-any-return]


class _AddLoss(torch.autograd.Function):
    """The identity on x. Its backward pass has the gradient 1 for the loss, which the next stage does not read."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:  # type: ignore[override]
        (loss,) = ctx.saved_tensors
        return g, torch.ones_like(loss)
