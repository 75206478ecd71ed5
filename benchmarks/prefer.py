"""Preference tuning on toys that a program can judge: GRPO on sums of digits, DPO on the largest digit.

GRPO  A small model is first tuned on the format: `2+3=` and a number, which is the sum in a tenth of the rows and random in the
      others. Then it is rewarded for the right sum; a step has about as many prompts as there are sums. (With an eighth of them
      it learned the most frequent sum for all prompts.) The rewards are those of one sampled answer per held-out row; its rows
      are of the same 36 sums as those it is trained on.
DPO   The same for `4 7 2?`, answered by one of its digits at random; then the largest digit is preferred to another one. The
      accuracy is that of held-out rows, most of which hold digits that no row to train on has in this order.

    python benchmarks/prefer.py --json
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import Goal, Row, arguments, progress, report

import dovetail as dt
from dovetail.decoding.generation import Vocabulary
from dovetail.text.learn import learn

SPEC = """
width: 64
vocab: 20
layers: [{repeat: 2, mixer: {heads: 4, kv_heads: 4, head: 16}, ffn: {hidden: 128}}]
"""
SEEDS = (0, 1, 2)
SIGNS = "0123456789+=? "
FORMAT = {"evals": 1, "batch": 16, "length": 64, "learning_rate": 3e-3, "quiet": True}
RIGHT = 0.1  # of the rows that teach the format of sums
ROWS = 2400  # of sums: 240 are held out
GRPO = {"batch": 288, "group": 8, "length": 64, "learning_rate": 1e-3, "max_tokens": 3, "quiet": True, "evals": 2}
DPO = {"batch": 16, "length": 16, "learning_rate": 5e-4, "beta": 0.1, "quiet": True, "evals": 2}


def start(place: Path, seed: int) -> Path:
    """Write a model with random weights and a tokenizer of characters."""
    model = dt.build(SPEC, seed=seed)
    model.vocabulary = Vocabulary(learn(SIGNS * 4, 20, "characters"))
    dt.save(model, place)
    return place


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def taught(place: Path, rows: list[dict[str, Any]], seed: int, steps: int) -> Path:
    """A model that has learned the form of the answers, and no more."""
    out, data = place / "sft", write(place / "format.jsonl", rows)
    dt.tune(start(place / "base", seed), data, steps=steps, seed=seed, out=out, **FORMAT)
    return out


def grpo(place: Path, seed: int, steps: int) -> dict[str, float]:
    """The reward of held-out rows before and after, and the seconds."""
    draw = random.Random(seed)
    prompts = [f"{a}+{b}=" for a, b in itertools.product(range(6), repeat=2)]
    drawn = [draw.choice(prompts) for _ in range(ROWS)]
    answers = [int(one[0]) + int(one[2]) if draw.random() < RIGHT else draw.randint(0, 10) for one in drawn]
    rows = [{"prompt": one, "completion": str(answer)} for one, answer in zip(drawn, answers, strict=True)]
    base = taught(place, rows, seed, 3 * steps // 2)
    sums = write(place / "sums.jsonl", [{"prompt": draw.choice(prompts)} for _ in range(ROWS)])
    begin = time.monotonic()
    how = {"method": "grpo", "reward": "digit_sum", "seed": seed, **GRPO}
    before = dt.tune(base, sums, steps=1, **{**how, "learning_rate": 1e-9})
    run = dt.tune(base, sums, steps=steps, out=place / "grpo", **how)
    rewards = [(one.val_metrics or {})["reward"] for one in (before.history[-1], run.history[-1])]
    return {"before": rewards[0], "after": rewards[1], "seconds": time.monotonic() - begin}


def dpo(place: Path, seed: int, steps: int) -> dict[str, float]:
    """The accuracy on held-out pairs, and the seconds."""
    draw = random.Random(seed)
    digits = [draw.sample(range(10), 3) for _ in range(800)]
    prompts = [f"{a} {b} {c}?" for a, b, c in digits]
    untaught = [{"prompt": one, "completion": str(draw.choice(some))} for one, some in zip(prompts, digits, strict=True)]
    base = taught(place, untaught, seed, steps // 4)
    pairs = [
        {"prompt": one, "chosen": str(max(some)), "rejected": str(draw.choice([d for d in some if d != max(some)]))}
        for one, some in zip(prompts, digits, strict=True)
    ]
    begin = time.monotonic()
    run = dt.tune(base, write(place / "pairs.jsonl", pairs), "dpo", steps=steps // 2, seed=seed, out=place / "dpo", **DPO)
    return {"accuracy": (run.history[-1].val_metrics or {})["accuracy"], "seconds": time.monotonic() - begin}


def main() -> None:
    args = arguments(__doc__ or "").parse_args()
    torch.set_num_threads(args.threads)
    seeds, steps = (SEEDS[:1], 4) if args.quick else (SEEDS, 600)
    measured: dict[str, list[dict[str, float]]] = {"grpo": [], "dpo": []}
    jobs: dict[str, Callable[[Path, int, int], dict[str, float]]] = {"grpo": grpo, "dpo": dpo}
    with progress("preference tuning", len(seeds) * len(jobs)) as tick:
        for seed in seeds:
            for name, job in jobs.items():
                with tempfile.TemporaryDirectory() as place:
                    measured[name].append(job(Path(place), seed, steps))
                print(f"seed {seed} {name}: {measured[name][-1]}", file=sys.stderr)
                tick()
    before, after = ([one[name] for one in measured["grpo"]] for name in ("before", "after"))
    accuracies = [one["accuracy"] for one in measured["dpo"]]
    rows = [
        Row("GRPO, digit sums: reward before, largest of the seeds", max(before), Goal(high=0.2)),
        Row("GRPO, digit sums: reward after, smallest of the seeds", min(after), Goal(low=0.9)),
        Row("GRPO: seconds per run, largest of the seeds", max(one["seconds"] for one in measured["grpo"])),
        Row("DPO, largest digit: held-out preference accuracy, smallest of the seeds", min(accuracies), Goal(low=0.9)),
        Row("DPO: seconds per run, largest of the seeds", max(one["seconds"] for one in measured["dpo"])),
    ]
    report(rows, args.json)


if __name__ == "__main__":
    main()
