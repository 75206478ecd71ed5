"""What a rank does in a comparison of layouts: train for some steps, and return what every layout must agree on.

The four models are a Llama, a hybrid of Mamba-2 and attention, a mixture of experts, and a model whose later layers attend to
keys and values of an earlier one. All have dropout, and sizes that differ, so that no transpose hides.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dovetail.data.corpus import Batch
from dovetail.data.loader import rows_of_rank
from dovetail.files.spec import from_yaml
from dovetail.nn.layout import TokenLayout
from dovetail.parallel.construction import full
from dovetail.parallel.layout import Axes, Layout
from dovetail.training.checkpoint import Checkpoints
from dovetail.training.loop import measure
from dovetail.training.objective import next_token
from dovetail.training.plan import OptimizerKind, Plan
from dovetail.training.ranks import JobRanks
from dovetail.training.step import Trainer

VOCAB, BATCH, LENGTH = 62, 4, 24
LR = 2e-3  # at 1e-2 steps amplify rounding: a difference of 4e-14 in a loss of the experts became 1e-5 within 25 steps
ENDS = "head: {kind: lm, tied: false}\ndropout: 0.1\n"
SPECS = {
    "llama": f"""
width: 28
vocab: {VOCAB}
{ENDS}
layers:
- repeat: 4
  mixer: {{heads: 6, kv_heads: 2, head: 12, dropout: 0.1}}
  ffn: {{hidden: 44, dropout: 0.1}}
""",
    "hybrid": f"""
width: 28
vocab: {VOCAB}
{ENDS}
layers:
- repeat: 4
  pattern: [space, full]
  space: {{mixer: {{kind: mamba2, head: 14, state_size: 10}}}}
  full: {{mixer: {{heads: 4, kv_heads: 2, head: 12}}}}
  ffn: {{hidden: 44, dropout: 0.1}}
""",
    "experts": f"""
width: 28
vocab: {VOCAB}
{ENDS}
layers:
- repeat: 4
  mixer: {{heads: 4, kv_heads: 2, head: 12}}
  ffn: {{kind: moe, experts: 6, hidden: 20, router: {{top_k: 2, balance_loss: 0.01}}}}
""",
    "shared": f"""
width: 28
vocab: {VOCAB}
{ENDS}
layers:
- mixer: {{heads: 4, kv_heads: 2, head: 12}}
  ffn: {{hidden: 44}}
- repeat: 3
  mixer: {{heads: 4, kv_heads: 2, head: 12, earlier: {{kind: shared_kv, layer: 0}}}}
  ffn: {{hidden: 44, dropout: 0.1}}
""",
}


class Trained(NamedTuple):
    """What a rank found: the loss and the gradient norm of each step, the tokens of the last, the held-out loss, and the
    weights it has, whole."""

    losses: list[float]
    norms: list[float]
    tokens: int
    held_out: float
    weights: dict[str, Tensor]


def batch_of(step: int) -> Batch:
    """The batch of a step: random rows, the last of which ends early."""
    tokens = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    labels = tokens[:, 1:].clone()
    labels[-1, LENGTH // 2 :] = -100
    return Batch(tokens[:, :-1], labels, TokenLayout.whole(BATCH, LENGTH))


def train_steps(
    spec: str, axes: Axes, steps: int, dtype: str = "float64", optimizer: OptimizerKind = "adamw", micro_batches: int = 1
) -> Trained:
    """Train a spec for some steps, on the ranks of a process group in a layout, or alone."""
    ranks = _ranks(axes)
    model = ranks.build(from_yaml(spec), seed=0, dtype=getattr(torch, dtype))
    plan = Plan(steps=steps, optimizer=optimizer, micro_batches=micro_batches)
    trainer = Trainer(model, next_token, plan, ranks)
    rows = rows_of_rank(BATCH, ranks.data_rank, ranks.data_count)
    found = [trainer.step(batch_of(step).some_rows(rows), step, LR) for step in range(steps)]
    held_out = measure(model, [batch_of(steps)], next_token, evaluate=trainer.evaluate)["loss"]
    weights = {path: full(weight.detach()) for path, weight in trainer.optimizer.weights.items()}
    return Trained([one.loss for one in found], [one.grad_norm for one in found], found[-1].tokens, held_out, weights)


def _ranks(axes: Axes) -> JobRanks:
    return JobRanks(dist.get_rank(), Layout.of(dist.get_world_size(), **axes)) if dist.is_initialized() else JobRanks()


def _trainer(axes: Axes, seed: int) -> Trainer:
    ranks = _ranks(axes)
    plan = Plan(steps=2, micro_batches=axes.get("pipeline", 1))
    return Trainer(ranks.build(from_yaml(SPECS["experts"]), seed=seed), next_token, plan, ranks)


def save_weights(place: str, axes: Axes) -> dict[str, Tensor]:
    """Save the checkpoint of a new model in a layout; the weights of this rank, whole."""
    trainer = _trainer(axes, 1)
    Checkpoints(place).save(1, trainer.tensors(), {"step": 1})
    return _whole(trainer)


def load_weights(place: str, axes: Axes) -> dict[str, Tensor]:
    """Load a checkpoint into a model in a layout; the weights of this rank, whole."""
    trainer, checkpoints = _trainer(axes, 2), Checkpoints(place)
    newest = checkpoints.latest()
    assert newest is not None, "a checkpoint was saved"
    checkpoints.load(newest, trainer.tensors())
    return _whole(trainer)


def _whole(trainer: Trainer) -> dict[str, Tensor]:
    return {name: full(tensor).clone() for name, tensor in trainer.tensors().items()}
