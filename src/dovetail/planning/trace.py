"""Trace a training step: run the real program as one rank of many, on a process group that exchanges nothing, with tensors that
have sizes and no values.

    trace = trace_step(spec, Layout(shards=128, tensor=8), Setting(rows=1, length=8192, micro_batches=4))

Construction, sharding, forward and backward pass, collectives, clipping and optimizer are those of `dovetail train`: nothing is
modeled but the kernels' own scratch memory. One process traces a rank of 16,384 as quickly as a rank of two, and allocates no
weight.

    step = first pass + (micro-batches − 1) · later pass + update         two micro-batches are run, others cost the same
"""

from __future__ import annotations

import dataclasses as dc
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import _redistribute
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.utils._pytree import tree_leaves

from dovetail.base.errors import UsageError
from dovetail.data.corpus import Batch
from dovetail.model.construction import on_meta, set_constants
from dovetail.model.model import Model, ModelModule
from dovetail.nn.block import BlockModule
from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout
from dovetail.nn.loss import LossSum
from dovetail.parallel.construction import allocate, local, shard_on_meta
from dovetail.parallel.context import whole_layout
from dovetail.parallel.layout import Layout
from dovetail.parallel.shard import reshard
from dovetail.planning.cost import Memory, StepTrace
from dovetail.planning.watch import Staging, Watch, no_staging
from dovetail.training.objective import NextToken
from dovetail.training.plan import OptimizerKind, Plan, Precision, Recompute
from dovetail.training.ranks import JobRanks
from dovetail.training.step import DTYPES, Trainer

PIECES = 2  # micro-batches that are run: the first has no gradients to add to
PASS, UPDATE = "pass", "update"  # phases of a step
FORWARD, BACKWARD = "forward", "backward"  # segments of a pass, one per layer


@dc.dataclass(frozen=True)
class Setting:
    """What a step computes, beside the layout: rows of a micro-batch on one rank, their length, and how."""

    rows: int = 1
    length: int = 2048
    micro_batches: int = 1
    precision: Precision = "bf16"
    recompute: Recompute = "none"
    optimizer: OptimizerKind = "adamw"

    def plan(self, micro_batches: int) -> Plan:
        """The plan of a run of one step."""
        return Plan(
            steps=1,
            precision=self.precision,
            recompute=self.recompute,
            optimizer=self.optimizer,
            micro_batches=micro_batches,
        )


@contextmanager
def fake_ranks(count: int, rank: int = 0) -> Iterator[None]:
    """Within this context the process is one rank of `count`; collectives return at once, and exchange nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise UsageError("plan: this process has a process group already; plan in a process that is no rank")
    _forget_meshes()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()
        _forget_meshes()


def _forget_meshes() -> None:
    """Clear DTensor's caches. They find a mesh by its shape: a second trace of the same shape would get the mesh of the first,
    whose process groups no longer exist."""
    _clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute.clear_redistribute_planner_cache()


def trace_step(spec: Model, layout: Layout, setting: Setting, staging: Staging = no_staging) -> StepTrace:
    """Trace a step of the rank of the layout that has the most to do."""
    rank = traced_rank(layout)
    with fake_ranks(layout.ranks, rank):
        ranks = JobRanks(rank, layout)
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        model = _fake_model(spec, ranks, setting, mode)
        watch = Watch(staging)
        with mode, watch.one_of_each():
            return watch_step(model, ranks, setting, watch)


def traced_rank(layout: Layout) -> int:
    """Return the rank that is traced: the first along every axis but the sequence, whose last chunk attends to most keys."""
    return (layout.sequence - 1) * layout.tensor


def _fake_model(spec: Model, ranks: JobRanks, setting: Setting, mode: FakeTensorMode) -> ModelModule:
    """Build the shard of this rank with fake tensors."""
    if ranks.mesh is None:
        model, slices = on_meta(spec), None
    else:
        model, slices = shard_on_meta(spec, ranks.mesh, compute_dtype=DTYPES[setting.precision])
    with mode:
        allocate(model, spec, "cpu")
    set_constants(model, spec, torch.float32, "cpu", slices)
    for module in model.modules():
        buffers: dict[str, Any] = module._buffers
        buffers.update({name: mode.from_tensor(value) for name, value in buffers.items() if value is not None})
    return model


def watch_step(model: ModelModule, ranks: JobRanks, setting: Setting, watch: Watch) -> StepTrace:
    """Train a model for one step on a batch without meaning, and count; its tensors may be real or fake."""
    pieces = min(setting.micro_batches, PIECES) if ranks.stages is None else setting.micro_batches
    weights = watch.hold([*model.parameters(), *model.buffers()])
    trainer = Trainer(model, _Marked(watch, ranks), setting.plan(pieces), ranks)
    optimizer = watch.hold(trainer.optimizer.state().values())
    watch.hold([] if trainer.copies is None else trainer.copies.copies.values())
    _mark_layers(model, watch)
    batch = fake_batch(setting.rows * pieces, setting.length)
    watch.hold([batch.tokens, batch.labels])
    if trainer.pipeline is not None:  # the first step learns the shapes of what stages send
        with watch, watch.pausing():
            trainer.pipeline.prepare(batch.pieces(pieces))
            reshard(model)
    with watch:
        trainer.step(batch, 0, 1e-3, functools.partial(_update, watch))
    gradients = {local(w.grad).untyped_storage() for w in trainer.weights if w.grad is not None}  # some share a storage
    cost = watch.cost("start").plus(watch.cost(UPDATE))
    if ranks.stages is None:
        cost = cost.plus(watch.cost(f"{PASS} 0")).plus(watch.cost(f"{PASS} {pieces - 1}"), setting.micro_batches - 1)
    memory = Memory(weights, sum(storage.nbytes() for storage in gradients), optimizer, watch.peak)
    parameters = sum(local(weight).numel() for weight in model.parameters())
    return StepTrace(parameters, cost, memory, watch.peaks)


class _Marked(NextToken):
    """The objective of next tokens, which marks the passes of a step."""

    def __init__(self, watch: Watch, ranks: JobRanks) -> None:
        self.watch, self.sequence, self.passes = watch, ranks.sequence, 0

    def __call__(self, model: ModelModule, batch: Batch, seed: int, training: bool) -> LossSum:
        self.watch.mark(f"{PASS} {self.passes}")
        self.passes += 1
        return super().__call__(model, batch, seed, training)

    def arguments(self, model: ModelModule, batch: Batch, seed: int, training: bool) -> tuple[Tensor, Tensor, Ctx]:
        if self.sequence is not None and isinstance(batch.tokens, FakeTensor):
            batch = dc.replace(batch, layout=self._known(batch, self.sequence))
        return super().arguments(model, batch, seed, training)

    def _known(self, batch: Batch, group: dist.ProcessGroup) -> TokenLayout:
        """The layout of this rank's chunk with values, and that of all chunks: attention reads from them which keys it sees.
        Ranks exchange these, so that the fake ones are gathered, too."""
        whole_layout(batch.layout, group)
        rows, n = batch.tokens.shape
        count = dist.get_world_size(group)
        with self.watch.pausing(), unset_fake_temporarily():
            whole = TokenLayout.whole(rows, n * count).numbered(0)
            chunk = whole.cut(count, dist.get_rank(group))
            chunk = TokenLayout(None, chunk.order, chunk.seg, sample=chunk.sample)
            parts = (whole.coords, whole.order, whole.seg, whole.sample)
            coords, order, seg, sample = (x.clone(memory_format=torch.contiguous_format) for x in parts)
        self.watch.hold((coords, order, seg, sample))
        chunk.memo["whole row", group] = TokenLayout(coords, order, seg, sample=sample)
        return chunk


def _update(watch: Watch) -> tuple[bool, ...]:
    """Mark the end of the backward passes; set no flag."""
    watch.mark(UPDATE)
    return ()


def _mark_layers(model: nn.Module, watch: Watch) -> None:
    """Make each block's forward and backward pass a segment."""
    for i, block in enumerate(module for module in model.modules() if isinstance(module, BlockModule)):
        forward, backward = (functools.partial(_mark, watch, name, i) for name in (FORWARD, BACKWARD))
        block.register_forward_pre_hook(forward)
        block.register_forward_hook(functools.partial(_mark_gradient, backward))


def _mark(watch: Watch, name: str, layer: int, *_: object) -> None:
    watch.mark_segment(f"{name} {layer}")


def _mark_gradient(mark: Callable[[Tensor], None], module: nn.Module, args: Any, out: Any) -> None:
    """Call `mark` when the gradient of a block's output arrives."""
    outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if outputs:
        outputs[0].register_hook(mark)


def fake_batch(rows: int, length: int) -> Batch:
    """Rows of whole documents."""
    tokens = torch.zeros(rows, length, dtype=torch.long)
    return Batch(tokens, tokens.clone(), TokenLayout.whole(rows, length).numbered(0))
