"""Thinking before answering: verifiable rewards teach a model to write its intermediate sums (GRPO).

    3 4 5 1 2 ?   = 13                  a guess: the whole sum in one forward pass              mostly wrong
    3 4 5 1 2 ?   7 12 13 15 = 15       thinks first: a running sum is an easy next token       more often right

The demonstrations that a model is tuned on first are of both kinds, and careless: most are guesses, and one running sum in ten
is wrong. Then nobody demonstrates anything. The model samples a group of answers to each prompt, a program compares the number
after the last "=" with the sum, and answers better than the mean of their group become more probable:

    Aᵢ = (rᵢ − mean r) / std r        loss = −Σₜ min(ρₜ Aᵢ, clip(ρₜ, 1 ± ε) Aᵢ)        ρₜ = π(yₜ) / π_old(yₜ)

The reward does not read the thoughts; they grow because they pay. Before the training a vote among 16 sampled answers is
better than one of them, at 16 times the tokens; after it, one answer does as well. The thoughts carry the sum: closed by hand
(`… ? =`) the same model guesses.                  Wei et al. 2022 (thoughts); Wang et al. 2022 (votes); Shao et al. 2024 (GRPO)

    python recipes/reason.py [--seeds 3] [--quick] [--out reason]            minutes on two cores; seconds with --quick
    python recipes/reason.py --quick --fault shuffled                        rewarded for the sum of another row: the goals fail
"""

from __future__ import annotations

import dataclasses as dc
import json
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import dovetail as dt

Figures = dict[str, tuple[float, float | None, float | None]]  # name -> value, lowest and highest that hold
SPEC = """
width: 64
vocab: 64
position: {kind: learned, length: 20}
init: {kind: normal, spread: 0.15}
head: {kind: lm, tied: false}
layers: [{repeat: 2, mixer: {heads: 4, head: 16, position: none}, ffn: {hidden: 192}}]
"""
VOTERS = (1, 2, 4, 8, 16)


@dc.dataclass(frozen=True)
class Setup:
    """The sizes of the experiment."""

    digits: int = 5  # of a sum
    largest: int = 5  # digit: sums have few values, so that minutes are enough
    demonstrations: int = 6000
    thinking: float = 0.4  # of the demonstrations; the others are guesses
    careless: float = 0.1  # of the running sums
    tune_steps: int = 250
    steps: int = 80
    batch: int = 128  # answers per step, in groups of 8
    held_out: int = 128
    goal: float = 0.8  # of pass@1 after the rewards


QUICK = Setup(digits=3, largest=3, demonstrations=3000, tune_steps=90, steps=30, held_out=64, goal=0.6)


def problems(setup: Setup, count: int, draw: random.Random) -> list[list[int]]:
    """Digits to add."""
    return [[draw.randint(0, setup.largest) for _ in range(setup.digits)] for _ in range(count)]


def prompt(digits: list[int]) -> str:
    """The digits to add."""
    return " ".join(map(str, digits)) + " ?"


def demonstration(setup: Setup, digits: list[int], draw: random.Random) -> str:
    """A careless answer: a guess near the sum, or running sums of which some are wrong."""
    if draw.random() >= setup.thinking:
        return f"= {max(0, sum(digits) + round(draw.gauss(0, 3)))}"
    sums = digits[:1]
    for digit in digits[1:]:
        slip = draw.choice((-2, -1, 1, 2)) if draw.random() < setup.careless else 0
        sums.append(max(0, sums[-1] + digit + slip))
    return f"{' '.join(map(str, sums[1:]))} = {sums[-1]}"


def answer(completion: str) -> str:
    """What follows the last "="."""
    return completion.rpartition("=")[2].strip()


def reward(asked: str, completion: str, row: dict[str, Any]) -> float:
    """1 where the answer is that of the row; a program computed it."""
    return float(answer(completion) == row["answer"])


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows as JSON Lines."""
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def measure(model: dt.Transformer, test: list[list[int]], seed: int) -> dict[str, Any]:
    """pass@1, the fraction of right votes by the number of voters, thoughts per answer, and pass@1 without thoughts."""
    sums = [str(sum(digits)) for digits in test]
    texts = dt.sample(model, [prompt(digits) for digits in test], choices=max(VOTERS), max_tokens=10, seed=seed)
    answers = [[answer(text) for text in some] for some in texts]
    closed = dt.sample(model, [prompt(digits) + " =" for digits in test], choices=8, max_tokens=2, seed=seed)
    return {
        "pass@1": mean(one == right for some, right in zip(answers, sums, strict=True) for one in some),
        "votes": [
            mean(Counter(some[:n]).most_common(1)[0][0] == right for some, right in zip(answers, sums, strict=True))
            for n in VOTERS
        ],
        "thoughts": mean(len(text.partition("=")[0].split()) for some in texts for text in some),
        "closed": mean(one == right for some, right in zip(closed, sums, strict=True) for one in some),
        "text": texts[0][0],
    }


def mean(values: Any) -> float:
    """The mean of numbers or truths."""
    values = list(values)
    return sum(values) / len(values)


def experiment(setup: Setup, seed: int, fault: str | None) -> tuple[Figures, Any]:
    """Tune on careless demonstrations, then by rewards; measure both models."""
    draw = random.Random(seed)
    test = problems(setup, setup.held_out, random.Random(10**6 + seed))
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        tokenizer = dt.learn_tokenizer("= ? " + " ".join(map(str, range(40))), 64, "wordpiece")
        dt.save(dt.build(SPEC, seed=seed, tokenizer=tokenizer), place / "random")
        shown = [
            {"prompt": prompt(digits), "completion": demonstration(setup, digits, draw)}
            for digits in problems(setup, setup.demonstrations, draw)
        ]
        careless = dt.tune(
            place / "random",
            write(place / "shown.jsonl", shown),
            steps=setup.tune_steps,
            batch=24,
            length=60,
            learning_rate=5e-3,
            seed=seed,
            out=place / "careless",
            evals=1,
        )
        asked = problems(setup, setup.steps * setup.batch // 8, draw)
        answers = [str(sum(digits)) for digits in asked]
        if fault == "shuffled":
            draw.shuffle(answers)
        rows = [{"prompt": prompt(digits), "answer": right} for digits, right in zip(asked, answers, strict=True)]
        thinker = dt.tune(
            place / "careless",
            write(place / "asked.jsonl", rows),
            "grpo",
            reward=reward,
            group=8,
            max_tokens=10,
            steps=setup.steps,
            batch=setup.batch,
            length=60,
            learning_rate=1e-3,
            seed=seed,
            out=place / "thinker",
            evals=1,
        )
        before, after = (measure(run.model, test, seed) for run in (careless, thinker))
    history = [(step.step, step.train_metrics["reward"], step.train_metrics["answer_tokens"]) for step in thinker.history]
    figures: Figures = {
        "pass@1 before": (before["pass@1"], None, 0.5),
        "pass@1 after": (after["pass@1"], setup.goal, None),
        "thoughts per answer before": (before["thoughts"], None, 0.65 * (setup.digits - 1)),
        "thoughts per answer after": (after["thoughts"], 0.75 * (setup.digits - 1), None),
        "vote of 16 before, above pass@1": (before["votes"][-1] - before["pass@1"], 0.1, None),
        "vote of 16 after": (after["votes"][-1], setup.goal, None),
        "pass@1 after, without thoughts": (after["closed"], None, 0.4),
    }
    return figures, {"before": before, "after": after, "history": history}


def draw(figure: Any, runs: list[Any]) -> None:
    """Draw reward and length by step, and right votes by the number of voters."""
    rewards, lengths, votes = figure.subplots(1, 3)
    for run in runs:
        steps, reward_of, length_of = zip(*run["history"], strict=True)
        rewards.plot(steps, reward_of, color="#2f5fb3", lw=1.2)
        lengths.plot(steps, length_of, color="#d9822b", lw=1.2)
        for name, color in (("before", "#8a90a0"), ("after", "#2f5fb3")):
            label = f"{name} the rewards" if run is runs[0] else None
            votes.plot(VOTERS, run[name]["votes"], color=color, marker="o", ms=3, lw=1.2, label=label)
        label = "after, thoughts closed by hand" if run is runs[0] else None
        votes.plot(VOTERS[:1], [run["after"]["closed"]], color="#d9822b", marker="s", ms=5, lw=0, label=label)
    rewards.set(xlabel="step", ylabel="reward", ylim=(0, 1.02), title="sampled answers that are right")
    lengths.set(xlabel="step", ylabel="tokens per answer", ylim=(0, None), title="length of answers, thoughts included")
    votes.set(xlabel="sampled answers that vote", ylabel="right", ylim=(0, 1.02), xscale="log", title="votes on held-out sums")
    votes.set_xticks(VOTERS, map(str, VOTERS))
    votes.minorticks_off()
    votes.legend(frameon=False)


RECIPE = dt.Recipe(experiment, draw, full=Setup(), quick=QUICK, faults={"shuffled": "pass@1 after"})

if __name__ == "__main__":
    sys.exit(RECIPE.main())
