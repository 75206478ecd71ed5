"""One training step: gradients of a batch, piece by piece, and one update.

    g = Σ_pieces ∂(Σ_labels loss)        count = Σ_pieces labels        over all ranks
    g ← g/count · min(1, clip/‖g/count‖) → optimizer → EMA ← decay·EMA + (1 − decay)·W → routers rebalance

Losses are added as sums and counts, so that pieces with different numbers of labels weigh as they would in one batch. A loss
or a norm that is not finite raises before any weight changes.                             Pascanu et al. 2013 (clipping)
"""

from __future__ import annotations

import dataclasses as dc
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dovetail.base.errors import Diverged, UsageError
from dovetail.data.corpus import Batch
from dovetail.model.model import ModelModule
from dovetail.nn.block import BlockModule
from dovetail.nn.declared_tensors import held
from dovetail.nn.finite import nonfinite_weight
from dovetail.nn.groups import RouterModule
from dovetail.nn.host import read_floats
from dovetail.nn.loss import LossSum
from dovetail.nn.module import tensor_at
from dovetail.parallel.construction import full, local
from dovetail.parallel.pipeline import MicroBatch, Pipeline
from dovetail.parallel.shard import reshard
from dovetail.training.objective import ByToken, Objective
from dovetail.training.optim import Optimizer
from dovetail.training.plan import Plan, Precision
from dovetail.training.ranks import JobRanks
from dovetail.training.recompute import Copies, recomputed

DTYPES: dict[Precision, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16}


class StepResult(NamedTuple):
    """What a step found, over all ranks: the mean loss over all labels, the gradient norm before clipping, the tokens, and
    whether some rank set each flag."""

    loss: float
    grad_norm: float
    tokens: int
    flags: tuple[bool, ...]


class Trainer:
    """A model in training: its optimizer, and the moving average of its weights where the plan has one."""

    def __init__(
        self,
        model: ModelModule,
        objective: Objective,
        plan: Plan,
        ranks: JobRanks | None = None,
        where: Callable[[int], str] | None = None,
    ) -> None:
        self.model, self.objective, self.plan, self.ranks = model, objective, plan, ranks or JobRanks()
        if not objective.by_row and (plan.micro_batches > 1 or self.ranks.data_count > 1):
            raise UsageError(f"{objective.name}: compares the rows of a batch; train on one rank, with one micro-batch")
        self.pipeline = _pipeline(model, objective, plan, self.ranks)
        self.where = where  # of a step: the place of its batch in the data, for errors
        dtype = DTYPES[plan.precision]
        self.copies = None if dtype is None or self.ranks.count > 1 else Copies(model, dtype)  # FSDP makes its own
        self.optimizer = Optimizer(
            model,
            plan.optimizer,
            betas=plan.betas,
            momentum=plan.momentum,
            weight_decay=plan.weight_decay,
            orthogonal_dtype=dtype,
        )
        self.weights = list(self.optimizer.weights.values())
        if not self.weights and self.ranks.count == 1:  # a stage of a pipeline may have none
            raise UsageError("no weight is trained: all have requires_grad = False, or are those of a base of adapters")
        self.frozen = any(d.frozen for d in held(model, model.part))  # with adapters; the base stays as it is
        self.ema = {} if plan.ema is None else {path: w.detach().clone() for path, w in self.optimizer.weights.items()}
        _prepare_blocks(model, plan)

    def step(self, batch: Batch, step: int, lr: float, flags: Callable[[], Sequence[bool]] = tuple) -> StepResult:
        """Train on a batch; raise Diverged where the loss or the gradient norm is not finite: no weight has changed then.
        `flags` are this rank's, read after the backward pass: they are added up in the collective of the loss."""
        self.optimizer.zero_grad()
        self.ranks.status.at("forward and backward", step + 1)
        batch = self.ranks.chunk(batch)
        seed = seed_of(self.plan.seed, step)  # of all pieces: random numbers are drawn by the number of a sample in the batch
        pieces = [piece.to(self.model.device) for piece in batch.pieces(self.plan.micro_batches)]
        total, tokens, any_flags = self.ranks.total(self._gradients(pieces, seed), batch.count, flags())
        gradients = [weight.grad for weight in self.weights if weight.grad is not None]
        norm = self.ranks.norm_of_stages(full(torch.nn.utils.get_total_norm(gradients)))
        dtype = torch.promote_types(total.sum.dtype, torch.float32)
        value, summed, labels = read_floats(*(x.to(dtype) for x in (total.mean(), norm, total.num_labels)))
        count = max(labels, 1.0) / self.ranks.token_ranks  # FSDP's gradients are means over ranks
        result = StepResult(value, summed / count, tokens, any_flags)
        if not (math.isfinite(result.loss) and math.isfinite(result.grad_norm)):
            batch_at = "" if self.where is None else f", on the batch {self.where(step)}"
            raise self.diverged(step, f"the loss is {result.loss}, the gradient norm {result.grad_norm}{batch_at}")
        factor = min(1.0, self.plan.clip / (result.grad_norm + 1e-6)) / count
        if factor != 1.0:
            for gradient in gradients:
                gradient.mul_(factor)
        self.ranks.status.at("optimizer", step + 1)
        self.optimizer.set_lr(lr)
        self.optimizer.step()
        self._average()
        if not self.frozen:
            rebalance(self.model)
        return result

    def _gradients(self, pieces: Sequence[Batch], seed: int) -> LossSum:
        """The backward pass of the pieces of a batch; the loss of this rank's labels."""
        if self.pipeline is not None:
            with self.computing():
                return self.pipeline.step(pieces, seed)
        losses: list[LossSum] = []
        for piece in pieces:
            with self.computing():
                loss = self.objective(self.model, piece, seed, True)
                loss.sum.backward()
            losses.append(LossSum(loss.sum.detach(), loss.num_labels))
        return functools.reduce(LossSum.plus, losses)

    def evaluate(self, batch: Batch, seed: int) -> dict[str, LossSum]:
        """The sums of a held-out batch, on all ranks; every rank has the same batch."""
        own = self.ranks.chunk(batch).to(self.model.device)
        if self.pipeline is not None:
            return self.ranks.over_chunks(self.pipeline.evaluate(own, seed))
        return self.ranks.over_chunks(self.objective.evaluate(self.model, own, seed))

    def computing(self) -> AbstractContextManager[Any]:
        """The context in which the model runs in the plan's precision."""
        return self.copies or nullcontext()

    def averaged(self) -> AbstractContextManager[None]:
        """The context in which the model has the moving average of its weights, where the plan has one."""
        return nullcontext() if not self.ema else _exchanged(self.model, self.optimizer.weights, self.ema)

    def take_average(self) -> None:
        """Give the model the moving average of its weights, where the plan has one."""
        for path, average in self.ema.items():
            local(self.optimizer.weights[path].detach()).copy_(local(average))

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor that a checkpoint holds, by name and in the order of names: equal states make equal files."""
        reshard(self.model)  # after an eval, FSDP has the weights outside blocks whole on every rank
        stored = [d.path for d in held(self.model, self.model.part) if d.checkpointed]
        found = {f"weights.{path}": tensor_at(self.model, path).detach() for path in stored}
        found |= {f"optimizer.{name}": value for name, value in self.optimizer.state().items()}
        found |= {f"ema.{name}": value for name, value in self.ema.items()}
        return dict(sorted(found.items()))

    def diverged(self, step: int, problem: str) -> Diverged:
        """The error of a step that is not finite."""
        weight = self.nonfinite()
        cause = f"; {weight}" if weight else ""
        return Diverged(f"step {step + 1}: {problem}{cause}; lower the learning rate (--learning-rate)")

    def nonfinite(self) -> str | None:
        """The first weight of this rank that is not finite, and its value."""
        return nonfinite_weight(self.model, self.model.part, local)

    @torch.no_grad()
    def _average(self) -> None:
        for path, average in self.ema.items():
            local(average).lerp_(local(self.optimizer.weights[path].detach()), 1 - (self.plan.ema or 0.0))


@dc.dataclass(frozen=True)
class _Staged:
    """An objective on a pipeline."""

    objective: ByToken
    pipeline: Pipeline

    def prepare(self, pieces: Sequence[Batch]) -> None:
        """Learn the shapes of what stages send, which the first step does otherwise."""
        self.pipeline.prepare([self._piece(piece, 0) for piece in pieces])

    def step(self, pieces: Sequence[Batch], seed: int) -> LossSum:
        """The forward and backward passes of micro-batches; this rank's part of the loss."""
        return self.pipeline.step([self._piece(piece, seed) for piece in pieces])

    def evaluate(self, batch: Batch, seed: int) -> dict[str, LossSum]:
        """The sums of a held-out batch."""
        piece, hits = self._piece(batch, seed, False), self.objective.accuracy
        loss, labels, *right = self.pipeline.evaluate(piece, hits)
        accuracy = {"accuracy": LossSum(right[0], labels)} if right else {}
        return {"loss": LossSum(loss, labels), **accuracy}

    def _piece(self, batch: Batch, seed: int, training: bool = True) -> MicroBatch:
        return MicroBatch(*self.objective.arguments(self.pipeline.model, batch, seed, training))


def _pipeline(model: ModelModule, objective: Objective, plan: Plan, ranks: JobRanks) -> _Staged | None:
    """The pipeline of ranks that have stages of a model; raise UsageError where objective or plan do not allow the layout."""
    for axis, size in {"sequence": ranks.layout.sequence, "pipeline": ranks.layout.pipeline}.items():
        if size > 1 and not isinstance(objective, ByToken):
            raise UsageError(f"--{axis}: {objective.name} needs whole rows on one rank; distribute rows, without --{axis}")
    if ranks.stages is None or not isinstance(objective, ByToken):
        return None
    if plan.micro_batches < ranks.layout.pipeline:
        at_least = f"a pipeline of {ranks.layout.pipeline} stages needs as many --micro-batches, better more"
        raise UsageError(f"--micro-batches: {plan.micro_batches} leave a stage without work; {at_least}")
    return _Staged(objective, Pipeline(model, ranks.stages))


def computing_in(model: ModelModule, precision: Precision, ranks: JobRanks) -> AbstractContextManager[Any]:
    """The context in which a model that is not yet trained runs in a precision; FSDP has its own copies."""
    dtype = DTYPES[precision]
    return nullcontext() if dtype is None or ranks.count > 1 else Copies(model, dtype)


class _exchanged(AbstractContextManager[None]):
    """Exchanges the values of a model's weights and another set of tensors, and back."""

    def __init__(self, model: nn.Module, a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
        self.model = model
        self.pairs = [(local(a[path].detach()), local(b[path])) for path in b]

    def __enter__(self) -> None:
        for one, other in self.pairs:
            kept = one.clone()
            one.copy_(other)
            other.copy_(kept)
        reshard(self.model)

    def __exit__(self, *_: object) -> None:
        self.__enter__()


def rebalance(model: nn.Module) -> None:
    """Update the balancing bias of every router that has one."""
    for module in model.modules():
        if isinstance(module, RouterModule):
            module.rebalance()


def seed_of(seed: int, step: int) -> int:
    """The seed of a step; below 2³¹, which every generator takes."""
    return (seed * 1_000_003 + step) % 2**31


def _blocks(model: nn.Module) -> Iterator[BlockModule]:
    yield from (module for module in model.modules() if isinstance(module, BlockModule))


def _prepare_blocks(model: nn.Module, plan: Plan) -> None:
    """Compile and recompute blocks, as the plan says."""
    for block in _blocks(model):
        recomputed(block, plan.recompute)
        if plan.compile:
            # what a recomputed forward pass puts into a cache of the context is there already
            torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
            block.compile()
