"""What law 8 runs on one rank and on several, and how far two runs are apart: the batch, of which each rank has some rows or a
piece of every row, the result of a run, and initial weights.

Of a pipeline law 8 compares two micro-batches through the stages of a model with the same on one rank: the loss with what parts
add, every gradient of this rank's stage, what the run adds to its buffers, and the held-out loss, in float64 with perturbed
weights, dropout and router noise.
"""

from __future__ import annotations

import dataclasses as dc

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dovetail.base.errors import SpecError
from dovetail.model.construction import build, generator
from dovetail.model.model import Model
from dovetail.nn.ctx import Ctx, Losses
from dovetail.nn.draws import Draws
from dovetail.nn.layout import TokenLayout
from dovetail.nn.loss import IGNORED, LossSum
from dovetail.nn.module import tensor_at
from dovetail.parallel.construction import build_sharded, local
from dovetail.parallel.context import piece
from dovetail.parallel.pipeline import MicroBatch, Pipeline
from dovetail.parallel.shard import fully_shard_model, tensor_parallel
from dovetail.parallel.stage import LayerStage, keep_stage
from dovetail.proof.laws.case import perturbed
from dovetail.spec.scope import Scope

# of the largest gradient: one that is smaller is compared at this scale, since it is zero but for rounding, or comes from
# probabilities so near 0 and 1 that their differences cancel (changing the weights by 1e-16 moves it by 1e-9 of itself)
SMALL = 1e-3


@dc.dataclass(frozen=True)
class LawBatch:
    """Inputs and their layout; a source where there is an encoder; the weights of the projection."""

    inputs: Tensor
    layout: TokenLayout
    source: Tensor | None
    source_layout: TokenLayout | None
    weight: Tensor  # of each output, zero at padding
    patches: Tensor | None = None  # of images among the inputs, those of the whole batch
    source_patches: Tensor | None = None
    labels: Tensor | None = None  # of the head, −100 at padding and elsewhere

    def rows(self, group: dist.ProcessGroup) -> LawBatch:
        """This rank's share of the rows."""
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        source_layout = None if self.source_layout is None else self.source_layout.split_rows(ranks, rank)
        layouts = {"layout": self.layout.split_rows(ranks, rank), "source_layout": source_layout}
        return dc.replace(self.columns(group, 0), **layouts)

    def columns(self, group: dist.ProcessGroup, dim: int = 1) -> LawBatch:
        """This rank's piece of every row, with the layouts of the whole rows."""
        tensors = {"inputs": self.inputs, "source": self.source, "weight": self.weight, "labels": self.labels}
        return dc.replace(self, **{name: piece(x, group, dim) for name, x in tensors.items() if x is not None})


def random_labels(spec: Model, out: Tensor, layout: TokenLayout, seed: int) -> Tensor | None:
    """Random labels for these outputs; −100 at padding, and at every fifth token. None without a head."""
    if spec.head is None:
        return None
    labels = spec.head.labels(spec.axes(Scope()), tuple(out.shape[:-1]), generator(seed, "labels"))
    if spec.head.pools() or labels.shape != layout.order.shape:
        return labels
    return labels.masked_fill(~layout.real | (layout.order % 5 == 4), IGNORED)


@dc.dataclass(frozen=True)
class RunResult:
    """What a run gives, of the whole batch and the whole model."""

    output: Tensor  # zero at padding
    losses: dict[str, Tensor]
    gradients: dict[str, Tensor]  # of every parameter, zero where none came
    added: dict[str, Tensor]  # to each buffer that the run changed


def gaps_of(got: RunResult, want: RunResult) -> dict[str, float]:
    """How far the outputs, losses, gradients and buffers are apart, relative to scale."""
    gaps = {"output": _gap(got.output, want.output)}
    least = SMALL * max(g.abs().max().item() for g in want.gradients.values())
    for kind, of_got, of_want, scale in (
        ("loss", got.losses, want.losses, 0.0),
        ("gradient of", got.gradients, want.gradients, least),
        ("change of", got.added, want.added, 0.0),
    ):
        for name in of_got.keys() | of_want.keys():
            both = name in of_got and name in of_want
            gaps[f"{kind} {name}"] = _gap(of_got[name], of_want[name], scale) if both else float("inf")
    return gaps


def _gap(got: Tensor, want: Tensor, least: float = 0.0) -> float:
    """The largest difference relative to scale; infinite where anything is not a number."""
    if got.shape != want.shape:
        return float("inf")
    gap = (got - want).abs().max().item() / max(want.abs().max().item(), least, 1e-30)
    return gap if gap == gap else float("inf")


def initial_gaps(spec: Model, seed: int, mesh: DeviceMesh) -> dict[str, float]:
    """The initial weights that this rank computes by itself against its shards of the whole model: for each parameter and
    buffer 0, or infinite where a dtype, a shape or a value differs.

    build_sharded(spec, mesh)     meta -> shard -> allocate and fill the local shard          no rank holds the whole
    build(spec) -> shard          the whole model on every rank, of which torch takes the shard
    """
    alone, whole = build_sharded(spec, mesh, seed=seed), build(spec, seed=seed)
    if mesh["tensor"].size() > 1:
        tensor_parallel(whole, spec, mesh["tensor"])
    if mesh["data"].size() > 1:
        fully_shard_model(whole, mesh["data"])
    gaps: dict[str, float] = {}
    for name, tensor in (*whole.named_parameters(), *whole.named_buffers()):
        got, want = local(tensor_at(alone, name)), local(tensor)
        same = got.dtype == want.dtype and torch.equal(got, want)
        gaps[f"initial {name}"] = 0.0 if same else float("inf")
    return gaps


MICRO_BATCHES = 2


def pipeline_gaps(spec: Model, seed: int, batch: LawBatch, group: dist.ProcessGroup) -> dict[str, float]:
    """How far the stages are from one rank, relative to scale; raise SpecError where the spec cannot be cut into stages."""
    stage = LayerStage.of(spec, dist.get_rank(group), dist.get_world_size(group))
    if batch.labels is None or spec.head is None or spec.head.pools():
        raise SpecError("head", "a pipeline ends with a loss over tokens, each with its label", "use an lm head")
    whole, staged = perturbed(spec, seed), perturbed(spec, seed)
    keep_stage(staged, stage)
    pipeline = Pipeline(staged, group)
    for model in (whole, staged):
        model.train()
    before = {name: buffer.clone() for name, buffer in whole.named_buffers()}
    losses: list[LossSum] = []
    for micro in _pieces(batch, seed):
        losses.append(whole.loss_sum(*micro))
        losses[-1].sum.backward()
    own = pipeline.step(_pieces(batch, seed))
    both = torch.stack([own.sum.double(), own.num_labels.double()])
    dist.all_reduce(both, group=group)
    want = torch.stack([sum(one.sum for one in losses), sum(one.num_labels for one in losses)]).detach()  # type: ignore[arg-type]
    held = dict(staged.named_parameters())
    mine = {name for name, _ in staged.named_buffers()}
    gradients = [{name: _gradient(dict(model.named_parameters())[name]) for name in held} for model in (staged, whole)]
    added = [{name: b - before[name] for name, b in model.named_buffers() if name in mine} for model in (staged, whole)]
    gaps = gaps_of(RunResult(both, {}, gradients[0], added[0]), RunResult(want, {}, gradients[1], added[1]))
    for model in (whole, staged):
        model.eval()
    micro = _pieces(batch, None)[0]
    loss, labels = pipeline.evaluate(micro)
    with torch.no_grad():
        held_out = whole.loss_sum(*micro)
    gaps["held-out loss"] = abs(loss / labels - held_out.mean()).item() / held_out.mean().abs().item()
    # every rank has other weights, so that their gaps are reported together
    return {"loss": gaps.pop("output"), "held-out loss": gaps.pop("held-out loss"), "gradients": max(gaps.values())}


def _pieces(batch: LawBatch, seed: int | None) -> list[MicroBatch]:
    """The micro-batches, with new contexts."""
    assert batch.labels is not None, "checked"
    pieces: list[MicroBatch] = []
    for first in range(MICRO_BATCHES):
        rows = slice(first, None, MICRO_BATCHES)
        ctx = Ctx(layout=batch.layout.some_rows(rows), patches=batch.patches)
        if seed is not None:
            ctx.draws, ctx.losses = Draws(seed), Losses()
        pieces.append(MicroBatch(batch.inputs[rows], batch.labels[rows], ctx))
    return pieces


def _gradient(weight: Tensor) -> Tensor:
    return torch.zeros_like(weight) if weight.grad is None else weight.grad
