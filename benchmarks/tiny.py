"""Small checkpoints with opinions: how often the top-1 token differs between float32 and bfloat16.

python benchmarks/tiny.py [--workers 2] [--json] [--quick]

For each of 20 families and each of 100 seeds: a small checkpoint as `dovetail tiny` makes it, and 384 positions of fresh random
tokens. A row per family counts the positions at which the top-1 token differs; the goal is none. A random model of the same
sizes, without opinions, is the comparison.
"""

from __future__ import annotations

import multiprocessing as mp
from typing import NamedTuple

import torch
from measure import Goal, Row, arguments, progress, report

from dovetail.base.errors import DovetailError
from dovetail.hf.peaked import RandomInputs, in_bfloat16, randomize, with_peaked_logits
from dovetail.hf.shrink import shrink
from dovetail.hf.survey import typical
from dovetail.model.construction import build
from dovetail.model.model import Model, ModelModule

FAMILIES = (
    *("llama", "gpt2", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "olmo2", "starcoder2"),
    *("smollm3", "gpt_neox", "falcon", "cohere2", "exaone4", "nemotron", "mixtral", "mamba", "bert"),
)
SEEDS, ROWS, TOKENS = 100, 8, 48


def main() -> None:
    """Count the flips."""
    parser = arguments(__doc__ or "")
    parser.set_defaults(threads=1)  # matrices are too small for more
    parser.add_argument("--workers", type=int, default=1, help="processes, each with its own families")
    options = parser.parse_args()
    families, seeds = (FAMILIES[:2], 2) if options.quick else (FAMILIES, SEEDS)
    works = [(family, seeds, options.threads) for family in families]
    with progress("families", len(families)) as tick, mp.get_context("spawn").Pool(options.workers) as pool:
        counts: list[Counts] = []
        for some in pool.imap(measured, works, chunksize=1):
            counts.append(some)
            tick()
    rows: list[Row] = []
    for family, (flips, refused, without) in zip(families, counts, strict=True):
        rows += [
            Row(f"{family}: flips", flips, Goal(high=0)),
            Row(f"{family}: refused", refused, Goal(high=0)),
            Row(f"{family}: flips without opinions", without),
        ]
    rows.append(Row("flips in all families", sum(one.flips for one in counts), Goal(high=0)))
    report([*rows, Row("checkpoints refused", sum(one.refused for one in counts), Goal(high=0))], options.json)


class Counts(NamedTuple):
    """Of one family: positions that flip, seeds for which no checkpoint was made, and flips of random models."""

    flips: int
    refused: int
    without: int


def measured(work: tuple[str, int, int]) -> Counts:
    """Make and compare the checkpoints of one family."""
    family, seeds, threads = work
    torch.set_num_threads(threads)
    spec = shrink(typical(family), family)
    flips = without = refused = 0
    for seed in range(seeds):
        try:
            flips += differing(with_peaked_logits(spec, seed)[0], spec, seed)
        except DovetailError:  # no clear margin
            refused += 1
        random = build(spec, seed=seed)
        randomize(random, seed)
        without += differing(random, spec, seed)
    return Counts(flips, refused, without)


@torch.no_grad()
def differing(model: ModelModule, spec: Model, seed: int) -> int:
    """The number of positions whose top-1 token differs between float32 and bfloat16."""
    inputs = RandomInputs.random(spec, seed, 1_000_000, ROWS, TOKENS)  # an index that no step of training has
    tops = (inputs.run(one).argmax(-1) for one in (model, in_bfloat16(model)))
    return int((next(tops) != next(tops)).sum())


if __name__ == "__main__":
    main()
