"""What ranks do in the tests of training on several ranks."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from dovetail.data.corpus import Batch
from dovetail.files.spec import from_yaml
from dovetail.nn.layout import TokenLayout
from dovetail.parallel.layout import Axes, Layout
from dovetail.training.checkpoint import Checkpoints
from dovetail.training.loop import measure
from dovetail.training.objective import next_token
from dovetail.training.pairs import Translation
from dovetail.training.plan import Plan
from dovetail.training.ranks import JobRanks
from dovetail.training.source import BatchShape
from dovetail.training.step import Trainer
from dovetail.training.tagging import TokenClassification, from_tags

SPEC = """
width: 28
vocab: 62
layers:
- repeat: 2
  mixer: {heads: 6, kv_heads: 2, head: 12}
  ffn: {hidden: 44}
"""


def flagged_step() -> tuple[int, tuple[bool, ...], int, float]:
    """One step, in which the last rank alone sets the second of three flags; the tokens, the flags, the calls of all_reduce,
    and the loss."""
    ranks = JobRanks(dist.get_rank(), Layout.of(dist.get_world_size()))
    trainer = Trainer(ranks.build(from_yaml(SPEC), seed=0), next_token, Plan(steps=2), ranks)
    tokens = torch.arange(36).reshape(4, 9)[2 * ranks.rank : 2 * ranks.rank + 2, : 9 - 3 * ranks.rank]
    batch = Batch(tokens[:, :-1], tokens[:, 1:], TokenLayout.whole(2, tokens.shape[1] - 1))
    calls, reduce = list[int](), dist.all_reduce

    def counted(tensor: torch.Tensor, *args: object, **kwargs: object) -> object:
        calls.append(tensor.numel())
        return reduce(tensor, *args, **kwargs)  # type: ignore[arg-type]

    dist.all_reduce = counted
    try:
        found = trainer.step(batch, 0, 1e-3, lambda: (False, ranks.rank == ranks.count - 1, False))
    finally:
        dist.all_reduce = reduce
    return found.tokens, found.flags, len(calls), found.loss


def translated(spec: str, pairs: str, axes: Axes, steps: int) -> dict[str, float]:
    """The held-out metrics of translation after some steps in float64, on the ranks of a process group, or alone."""
    ranks = JobRanks(dist.get_rank(), Layout.of(dist.get_world_size(), **axes)) if dist.is_initialized() else JobRanks()
    model = from_yaml(spec)
    shape = BatchShape(4, 8, 0, ranks.data_rank, ranks.data_count)
    source = Translation.read_pairs(Path(pairs), model, "characters", shape, lambda _: None)
    objective = Translation.of(model, source.tokenizer, 8).configured({"beams": 2})
    trainer = Trainer(ranks.build(model, seed=3, dtype=torch.float64), objective, Plan(steps=2), ranks)
    for step in range(steps):
        trainer.step(source.batch(step), step, 0.01)
    return measure(trainer.model, source.held_out, objective, evaluate=trainer.evaluate)


def tagged(spec: str, tags: str, axes: Axes, steps: int) -> dict[str, float]:
    """The same of token classification."""
    ranks = JobRanks(dist.get_rank(), Layout.of(dist.get_world_size(), **axes)) if dist.is_initialized() else JobRanks()
    model = from_yaml(spec)
    source = from_tags(Path(tags), model, "words", BatchShape(4, 12, 0, ranks.data_rank, ranks.data_count), lambda _: None)
    objective = TokenClassification(tuple(source.classes))
    trainer = Trainer(ranks.build(model, seed=3, dtype=torch.float64), objective, Plan(steps=2), ranks)
    for step in range(steps):
        trainer.step(source.batch(step), step, 0.01)
    return measure(trainer.model, source.held_out, objective, evaluate=trainer.evaluate)


def save_step(place: str, seed: int, step: int) -> None:
    """Save the sharded weights of a new model as a checkpoint."""
    ranks = JobRanks(dist.get_rank(), Layout.of(dist.get_world_size()))
    model = ranks.build(from_yaml(SPEC), seed=seed)
    trainer = Trainer(model, next_token, Plan(steps=2), ranks)
    Checkpoints(place).save(step, trainer.tensors(), {"step": step})
