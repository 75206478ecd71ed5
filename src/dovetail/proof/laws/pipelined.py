"""What law 8 compares of a pipeline: two micro-batches through the stages of a model, and the same on one rank.

Compared are the loss with what parts add, every gradient of this rank's stage, what the run adds to its buffers, and the
held-out loss, in float64 with perturbed weights, dropout and router noise.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from dovetail.core.ctx import Ctx
from dovetail.core.errors import SpecError
from dovetail.core.loss import LossSum
from dovetail.model import Model
from dovetail.parallel.pipeline import Piece, Pipeline
from dovetail.parallel.stage import Stage, keep_stage
from dovetail.proof.laws.case import perturbed
from dovetail.proof.laws.sharded_batch import Batch, Result, gaps_of

MICRO_BATCHES = 2


def pipeline_gaps(spec: Model, seed: int, batch: Batch, group: dist.ProcessGroup) -> dict[str, float]:
    """How far the stages are from one rank, relative to scale; raise SpecError where the spec cannot be cut into stages."""
    stage = Stage.of(spec, dist.get_rank(group), dist.get_world_size(group))
    if batch.labels is None or spec.head is None or spec.head.pools():
        raise SpecError("head", "a pipeline ends with a loss over tokens, each with its label", "use an lm head")
    whole, staged = perturbed(spec, seed), perturbed(spec, seed)
    keep_stage(staged, stage)
    pipeline = Pipeline(staged, group)
    for model in (whole, staged):
        model.train()
    before = {name: buffer.clone() for name, buffer in whole.named_buffers()}
    losses: list[LossSum] = []
    for piece in _pieces(batch, seed):
        losses.append(whole.loss_sum(*piece))
        losses[-1].sum.backward()
    own = pipeline.step(_pieces(batch, seed))
    both = torch.stack([own.sum.double(), own.num_labels.double()])
    dist.all_reduce(both, group=group)
    want = torch.stack([sum(one.sum for one in losses), sum(one.num_labels for one in losses)]).detach()  # type: ignore[arg-type]
    held = dict(staged.named_parameters())
    mine = {name for name, _ in staged.named_buffers()}
    gradients = [{name: _gradient(dict(model.named_parameters())[name]) for name in held} for model in (staged, whole)]
    added = [{name: b - before[name] for name, b in model.named_buffers() if name in mine} for model in (staged, whole)]
    gaps = gaps_of(Result(both, {}, gradients[0], added[0]), Result(want, {}, gradients[1], added[1]))
    for model in (whole, staged):
        model.eval()
    piece = _pieces(batch, None)[0]
    loss, labels = pipeline.evaluate(piece)
    with torch.no_grad():
        held_out = whole.loss_sum(*piece)
    gaps["held-out loss"] = abs(loss / labels - held_out.mean()).item() / held_out.mean().abs().item()
    # every rank has other weights, so that their gaps are reported together
    return {"loss": gaps.pop("output"), "held-out loss": gaps.pop("held-out loss"), "gradients": max(gaps.values())}


def _pieces(batch: Batch, seed: int | None) -> list[Piece]:
    """The micro-batches, with new contexts."""
    assert batch.labels is not None, "checked"
    pieces: list[Piece] = []
    for first in range(MICRO_BATCHES):
        rows = slice(first, None, MICRO_BATCHES)
        losses = None if seed is None else dict[str, Tensor]()
        ctx = Ctx(layout=batch.layout.some_rows(rows), seed=seed, losses=losses, patches=batch.patches)
        pieces.append(Piece(batch.inputs[rows], batch.labels[rows], ctx))
    return pieces


def _gradient(weight: Tensor) -> Tensor:
    return torch.zeros_like(weight) if weight.grad is None else weight.grad
