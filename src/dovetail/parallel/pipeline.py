"""Pipeline parallelism: micro-batches go through the stages of a model (parallel/stage.py) by one of torch's schedules.

    stage 0   F0 F1 F2 F3 B0 F4 B1 F5 B2 …          one forward and one backward pass in turn, so that a stage keeps the
    stage 1      F0 F1 F2 B0 F3 B1 F4 B2 …          activations of no more micro-batches than there are stages behind it
    idle time / time = (stages − 1) / (micro-batches + stages − 1)             Narayanan et al. 2019; Fan et al. 2021 (1F1B)

Every rank of a pipeline reads the same rows: the first uses the token ids, the last the labels, all of them positions and the
numbers that random numbers are drawn by. Shapes of what is sent are those of one forward pass without gradients, before the
first step. Gradients of FSDP are reduced once, after the last micro-batch.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from dovetail.base.errors import UsageError
from dovetail.model.model import ModelModule
from dovetail.nn.ctx import Ctx
from dovetail.nn.loss import LossSum
from dovetail.nn.module import evaluating
from dovetail.parallel.collective import send_tensors, take_tensors
from dovetail.parallel.stage import LayerStage, added_loss


class MicroBatch(NamedTuple):
    """A micro-batch: what `ModelModule.loss_sum` takes."""

    tokens: Tensor
    labels: Tensor
    ctx: Ctx

    def arguments(self) -> dict[str, Any]:
        """The arguments of a stage's forward pass, beside what the stage before sent."""
        return {"tokens": self.tokens, "labels": self.labels, "ctx": self.ctx}


class Pipeline:
    """This rank's stage of a model, and the ranks with the others."""

    def __init__(self, model: ModelModule, group: dist.ProcessGroup) -> None:
        self.model, self.group = model, group
        self.stage = LayerStage.of(model.part, dist.get_rank(group), dist.get_world_size(group))
        self.running: _Running | None = None
        self.schedule: Schedule1F1B | None = None
        self.shapes: list[torch.Size] = []  # of the micro-batches that the schedule is for

    def step(self, pieces: Sequence[MicroBatch]) -> LossSum:
        """The forward and backward passes of some micro-batches of one shape; this stage's part of the loss: all labels are
        counted on the last one, and losses that parts add where they are."""
        shapes = [piece.tokens.shape for piece in pieces]
        if len(set(shapes)) > 1:
            rows = [len(piece.tokens) for piece in pieces]
            raise UsageError(f"--micro-batches: of a pipeline must have equally many rows, and have {rows}; change --batch")
        if self.schedule is None or shapes != self.shapes:
            self.prepare(pieces)
        assert self.schedule is not None, "prepared"
        assert self.running is not None, "prepared"
        self.running.pieces = pieces
        tokens, numbers = torch.cat([piece.tokens for piece in pieces]), torch.arange(len(pieces))
        found = self.schedule.step(*([tokens] if self.stage.first else []), target=numbers if self.stage.last else None)
        self.running.pieces = ()
        if found is not None:  # on the last stage
            total, labels = found.detach().view(len(pieces), -1).sum(0)
            return LossSum(total, labels)
        added = [loss.detach() for piece in pieces if (loss := added_loss(piece.ctx, piece.labels)) is not None]
        zero = torch.zeros((), device=self.model.device)
        return LossSum(torch.stack(added).sum() if added else zero, zero)

    @torch.no_grad()
    def evaluate(self, piece: MicroBatch, hits: bool = False) -> Tensor:
        """(2,), with `hits` (3,): the loss of a batch summed over its labels, their number, and the number of those that are
        the most probable answer; on every rank."""
        _, out = self._forward(piece, hits)
        result = out[0] if self.stage.last else torch.empty(3 if hits else 2, dtype=torch.float64, device=self.model.device)
        result = result.double()
        dist.broadcast(result, group=self.group, group_src=self.stage.count - 1)
        return result

    def _forward(self, piece: MicroBatch, hits: bool = False) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        """What this stage receives and returns in a forward pass on one batch."""
        before = [piece.tokens] if self.stage.first else take_tensors(piece.tokens, self.stage.index - 1, self.group)
        found = self.model(*before, **piece.arguments(), hits=hits)
        out = (found,) if isinstance(found, Tensor) else tuple(found)
        if not self.stage.last:
            send_tensors(out, self.stage.index + 1, self.group)
        return before, out

    @torch.no_grad()
    def prepare(self, pieces: Sequence[MicroBatch]) -> None:
        """Make the schedule for micro-batches of these shapes."""
        piece = pieces[0]
        with evaluating(self.model):
            before, out = self._forward(piece._replace(ctx=dc.replace(piece.ctx, draws=None, losses=None)))
        learned = not self.stage.first
        given = tuple(torch.empty_like(x, device="meta", requires_grad=learned and x.is_floating_point()) for x in before)
        returned = tuple(torch.empty_like(x, device="meta", requires_grad=True) for x in out)
        device = self.model.device
        self.running = _Running(self.model, self.stage.index, self.stage.count, device, given, returned, group=self.group)
        self.schedule = Schedule1F1B(self.running, len(pieces), lambda found, _: found[0], scale_grads=False)
        self.shapes = [one.tokens.shape for one in pieces]


class _Running(PipelineStage):
    """A stage in torch's schedule: each micro-batch has a ctx of its own."""

    pieces: Sequence[MicroBatch] = ()

    def forward_one_chunk(self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: bool = True) -> Any:
        return super().forward_one_chunk(fwd_chunk_id, args, self.pieces[fwd_chunk_id].arguments(), save_forward_output)
