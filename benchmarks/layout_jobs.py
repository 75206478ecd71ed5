"""What a rank does in a comparison of layouts: train for some steps, and return what every layout must agree on.

The four models are a Llama, a hybrid of Mamba-2 and attention, a mixture of experts, and a model whose later layers attend to
keys and values of an earlier one. All have dropout, and sizes that differ, so that no transpose hides.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dovetail.core.layout import TokenLayout
from dovetail.datasets.corpus import Batch
from dovetail.datasets.loader import rows_of_rank
from dovetail.dist.construction import full
from dovetail.dist.layout import Layout
from dovetail.io.spec import from_yaml
from dovetail.training.objective import next_token
from dovetail.training.plan import Plan
from dovetail.training.ranks import Ranks
from dovetail.training.step import Trainer

VOCAB, BATCH, LENGTH = 62, 4, 24
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
    """What a rank found: the loss and the gradient norm of each step, the tokens of the last, and the weights it has, whole."""

    losses: list[float]
    norms: list[float]
    tokens: int
    weights: dict[str, Tensor]


def batch_of(step: int) -> Batch:
    """The batch of a step: random rows, the last of which ends early."""
    tokens = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    labels = tokens[:, 1:].clone()
    labels[-1, LENGTH // 2 :] = -100
    return Batch(tokens[:, :-1], labels, TokenLayout.whole(BATCH, LENGTH))


def train_steps(spec: str, axes: dict[str, int], steps: int, dtype: str = "float64", **plan: Any) -> Trained:
    """Train a spec for some steps, on the ranks of a process group in a layout, or alone."""
    alone = not dist.is_initialized()
    ranks = Ranks() if alone else Ranks(dist.get_rank(), Layout.of(dist.get_world_size(), **axes))
    model = ranks.build(from_yaml(spec), seed=0, dtype=getattr(torch, dtype))
    trainer = Trainer(model, next_token, Plan(steps=steps, **plan), ranks)
    rows = rows_of_rank(BATCH, ranks.data_rank, ranks.data_count)
    found = [trainer.step(batch_of(step).some_rows(rows), step, 1e-2) for step in range(steps)]
    weights = {path: full(weight.detach()) for path, weight in trainer.optimizer.weights.items()}
    return Trained([one.loss for one in found], [one.grad_norm for one in found], found[-1].tokens, weights)
