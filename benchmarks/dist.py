"""Layouts of training on several ranks: the same losses as on one rank, checkpoints that load in every layout, and the time of
a step compared with the same written bare on torch.distributed.

Two and four ranks (gloo, one process and one thread each) train a Llama, a hybrid of Mamba-2 and attention, a mixture of
experts and a model with shared keys and values, with dropout, for 50 steps in every layout. A row is the largest difference of
a loss, over steps, models and ranks, to that of one rank with the same micro-batches; in float64 it has a goal, in float32 (the
Llama alone) it is the drift. Steps are timed in turns within the same two processes: ours, and a loop of FSDP, AdamW and
clipping on the same modules.
"""

from __future__ import annotations

import functools
import sys
import tempfile
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from layout_jobs import SPECS, Trained, load_weights, save_weights, train_steps
from measure import Goal, Row, arguments, middle, progress, report, taking_steps
from torch.distributed.fsdp import fully_shard

from dovetail.data.corpus import Batch
from dovetail.files.spec import from_yaml
from dovetail.model.construction import build
from dovetail.nn.layout import TokenLayout
from dovetail.parallel.layout import Axes, Layout
from dovetail.parallel.pair import Pair
from dovetail.training.objective import next_token
from dovetail.training.plan import Plan
from dovetail.training.ranks import JobRanks
from dovetail.training.step import Trainer

EQUAL = Goal(high=1e-9)
SAME = Goal(high=0)
FAST = Goal(low=0.97)
LAYOUTS: dict[int, dict[str, Axes]] = {
    2: {
        "DDP 2": {"shards": 1},
        "FSDP 2": {},
        "sequence 2": {"sequence": 2},
        "sequence 2 by ring": {"sequence": 2, "ring": True},
        "tensor 2": {"tensor": 2},
        "pipeline 2": {"pipeline": 2},
    },
    4: {
        "FSDP 4": {},
        "HSDP 2 × 2": {"shards": 2},
        "sequence 4": {"sequence": 4},
        "pipeline 4": {"pipeline": 4},
        "FSDP 2 × tensor 2": {"tensor": 2},
        "FSDP 2 × sequence 2": {"sequence": 2},
        "FSDP 2 × pipeline 2": {"pipeline": 2},
        "sequence 2 × tensor 2": {"sequence": 2, "tensor": 2},
        "sequence 2 × pipeline 2": {"sequence": 2, "pipeline": 2},
        "tensor 2 × pipeline 2": {"tensor": 2, "pipeline": 2},
    },
}
TIMED = """
width: 256
vocab: 2048
head: {kind: lm, tied: false}
layers:
- repeat: 4
  mixer: {heads: 8, kv_heads: 4, head: 32}
  ffn: {hidden: 704}
"""


def largest_difference(
    ranks: Pair, names: Sequence[str], axes: Axes, steps: int, dtype: str, one: Callable[[str, int, str], Trained]
) -> float:
    """The largest difference of a loss to that of one rank, over models, steps and ranks."""
    micro_batches = axes.get("pipeline", 1)
    worst = 0.0
    for name in names:
        whole = one(name, micro_batches, dtype).losses
        for found in ranks.run(train_steps, SPECS[name], axes, steps, dtype, "adamw", micro_batches, timeout=600):
            worst = max(worst, *(abs(a - b) for a, b in zip(found.losses, whole, strict=True)))
    return worst


def different_weights(ranks: Pair, axes: Axes) -> int:
    """How many weights differ in a bit after a checkpoint went from a layout to one rank and back, or from one rank to it."""
    with tempfile.TemporaryDirectory() as place:
        saved = {path: tensor for one in ranks.run(save_weights, f"{place}/a", axes) for path, tensor in one.items()}
        here = load_weights(f"{place}/a", {})
        there = ranks.run(load_weights, f"{place}/a", axes)
        alone = save_weights(f"{place}/b", {})
        gone = ranks.run(load_weights, f"{place}/b", axes)
    pairs = [(saved, here), *((saved, one) for one in there), *((alone, one) for one in gone)]
    assert set(here) == set(saved) == set(alone), "a layout has all weights"
    return sum(not torch.equal(before[path], tensor) for before, after in pairs for path, tensor in after.items())


def timed(steps: int, rounds: int) -> list[float]:
    """On each rank: the time of a bare step ÷ ours, in each round."""
    rank, count = dist.get_rank(), dist.get_world_size()
    rows, length = 8, 128
    tokens = torch.randint(2048, (rows, length + 1), generator=torch.Generator().manual_seed(rank))
    ranks = JobRanks(rank, Layout.of(count))
    spec = from_yaml(TIMED)
    trainer = Trainer(ranks.build(spec, seed=0), next_token, Plan(steps=10_000), ranks)
    batch = Batch(tokens[:, :-1], tokens[:, 1:], TokenLayout.whole(rows, length))
    bare = build(spec, seed=0).train()
    for layer in bare.layers:
        fully_shard(layer)
    fully_shard(bare)
    optimizer = torch.optim.AdamW(bare.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def ours(step: int) -> None:
        trainer.step(batch, step, 1e-3)

    def theirs(_: int) -> None:
        optimizer.zero_grad()
        logits = bare(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(bare.parameters(), 1.0)
        optimizer.step()
        loss.item()

    return taking_steps(ours, theirs, steps, rounds, lambda: None)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", nargs="*", help="names of layouts")
    options = parser.parse_args()
    steps = 2 if options.quick else 50
    torch.set_num_threads(1)

    @functools.cache
    def one(name: str, micro_batches: int, dtype: str) -> Trained:
        return train_steps(SPECS[name], {}, steps, dtype, "adamw", micro_batches)

    rows: list[Row] = []
    chosen = [(n, name, axes) for n, some in LAYOUTS.items() for name, axes in some.items() if name in (options.only or some)]
    with progress("layouts", len(chosen) + 1) as tick:
        for n in LAYOUTS:
            with Pair(n, timeout=600) as ranks:
                for _, name, axes in (row for row in chosen if row[0] == n):
                    wide = largest_difference(ranks, list(SPECS), axes, steps, "float64", one)
                    narrow = largest_difference(ranks, ["llama"], axes, steps, "float32", one)
                    rows.append(Row(f"{name}: loss − that of one rank", wide, EQUAL))
                    rows.append(Row(f"{name}: the same in float32, Llama", narrow))
                    rows.append(Row(f"{name}: weights that a checkpoint changes", different_weights(ranks, axes), SAME))
                    print(*(f"{row.name}: {row.value:.2g}" for row in rows[-3:]), sep="; ", file=sys.stderr)
                    tick()
        with Pair(2, timeout=600) as ranks:
            ratios = ranks.run(timed, 2 if options.quick else 6, 2 if options.quick else 9)
        value, spread = middle(ratios[0])
        rows.append(Row("step: bare FSDP loop ÷ ours, 2 ranks", value, FAST, spread))
        tick()
    report(rows, options.json)


if __name__ == "__main__":
    main()
