"""Models whose greedy tokens depend on their context and are no near-ties, and what the model itself says of them.

Weights are random, far from their initial values; a seed is taken for which the two best logits differ by MARGIN along every
continuation, some fifty times the rounding of float32, and every continuation has several tokens. So equal tokens mean equal
models; `otherwise` shows that a model without the tested part continues with other tokens.
"""

from __future__ import annotations

import dataclasses as dc
from pathlib import Path

import pytest
import torch
from torch import Tensor

import dovetail as dt
from dovetail.hf.peaked import randomize
from dovetail.model.construction import generator
from dovetail.model.model import Model

ROOT = Path(__file__).parents[2]
TOKENS, MARGIN, SEEDS, FEWEST = 256, 5e-4, 40, 6


def python() -> Path:
    """The interpreter of vLLM's environment."""
    ready = ROOT / ".peers/vllm/ready"
    if not ready.exists():
        pytest.skip("bash benchmarks/peers/make vllm")
    return ready.parent / "bin/python"


@dc.dataclass(frozen=True)
class Decided:
    """A model, prompts, and what greedy decoding makes of them."""

    model: dt.Transformer
    seed: int
    prompts: list[list[int]]
    tokens: list[list[int]]
    logprobs: list[list[float]]


def prompts(vocab: int) -> list[list[int]]:
    """Prompts longer than a chunk, two of which begin alike, and a short one."""
    draw = generator(0, "prompts")
    first, second, short = (torch.randint(vocab, (n,), generator=draw).tolist() for n in (70, 23, 5))
    return [first, first[:50] + second, short]


def decided(spec: Model, count: int = TOKENS) -> Decided:
    """The first model of some seeds whose `count` greedy tokens are no near-ties."""
    asked = prompts(spec.vocab)
    for seed in range(SEEDS):
        model = dt.build(spec, seed=seed)
        randomize(model, seed)
        continued: list[tuple[list[int], list[float]]] = []
        for prompt in asked:
            tokens, logprobs, margin = continuation(model, prompt, count)
            if margin < MARGIN or len(set(tokens)) < FEWEST:
                break
            continued.append((tokens, logprobs))
        else:
            return Decided(model, seed, asked, *map(list, zip(*continued, strict=True)))
    raise AssertionError(f"no seed of {SEEDS} gives clear tokens")


@torch.no_grad()
def continuation(model: dt.Transformer, prompt: list[int], count: int) -> tuple[list[int], list[float], float]:
    """The greedy tokens after a prompt, their log-probs, and the least difference of the two best logits."""
    tokens = model.generate(prompt, count)
    logits: Tensor = model(torch.tensor([prompt + tokens[:-1]]))[0, len(prompt) - 1 :]
    best = logits.topk(2, -1).values
    logprobs = logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    return tokens, logprobs.tolist(), (best[:, 0] - best[:, 1]).min().item()


def otherwise(found: Decided, without: Model) -> bool:
    """Whether the model with the same random weights, but without the tested part, continues every prompt with other tokens."""
    other = dt.build(without, seed=found.seed)
    randomize(other, found.seed)
    return all(
        other.generate(prompt, len(tokens)) != tokens for prompt, tokens in zip(found.prompts, found.tokens, strict=True)
    )
