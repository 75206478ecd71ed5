"""Small checkpoints with opinions: how often the top-1 token differs between float32 and bfloat16.

python benchmarks/tiny.py [--json] [--quick]

For each of 20 families and each of 100 seeds: a small checkpoint as `dovetail tiny` makes it, and 384 positions of fresh random
tokens. A row per family counts the positions at which the top-1 token differs; the goal is none. A random model of the same
sizes, without opinions, is the comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from measure import Goal, Row, arguments, progress, report

from dovetail.api.tiny import typical
from dovetail.construction import build
from dovetail.model import Model, ModelModule
from dovetail.port.opinion import Inputs, in_bfloat16, opinionated, randomize
from dovetail.port.shrink import shrink

FAMILIES = (
    *("llama", "gpt2", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "olmo2", "starcoder2"),
    *("smollm3", "gpt_neox", "falcon", "cohere2", "exaone4", "nemotron", "mixtral", "mamba", "bert"),
)
SEEDS, ROWS, TOKENS = 100, 8, 48


def main() -> None:
    """Count the flips."""
    parser = arguments(__doc__ or "")
    parser.set_defaults(threads=1)  # matrices are too small for more
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    families, seeds = (FAMILIES[:2], 2) if options.quick else (FAMILIES, SEEDS)
    with progress("checkpoints", len(families) * seeds) as tick:
        rows = [row for family in families for row in measured(family, seeds, tick)]
    total = sum(row.value for row in rows if row.goal is not None)
    report([*rows, Row("flips in all families", total, Goal(high=0))], options.json)


def measured(family: str, seeds: int, tick: Callable[[], None]) -> Iterator[Row]:
    """The flips of one family."""
    spec = shrink(typical(family), family)
    flips = without = 0
    for seed in range(seeds):
        flips += differing(opinionated(spec, seed)[0], spec, seed)
        random = build(spec, seed=seed)
        randomize(random, seed)
        without += differing(random, spec, seed)
        tick()
    yield Row(f"{family}: flips", flips, Goal(high=0))
    yield Row(f"{family}: flips without opinions", without)


@torch.no_grad()
def differing(model: ModelModule, spec: Model, seed: int) -> int:
    """The number of positions whose top-1 token differs between float32 and bfloat16."""
    inputs = Inputs.random(spec, seed, 1_000_000, ROWS, TOKENS)  # an index that no step of training has
    tops = (inputs.run(one).argmax(-1) for one in (model, in_bfloat16(model)))
    return int((next(tops) != next(tops)).sum())


if __name__ == "__main__":
    main()
