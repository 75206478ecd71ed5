"""LoRA on all linear layers learns more than LoRA on attention alone at an equal number of parameters, on a small task.

    y_t = g(x_t), g a random map of the vocabulary: facts about single tokens, which no other token helps with

The base is trained on one such map; the adapters learn another. Schulman et al. 2025 ("LoRA without regret") report the same of
large models. Each side has the best of a few learning rates.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import dovetail as dt
from dovetail.weights.adapters.attach import attach

VOCAB, STEPS, BATCH, LENGTH = 48, 120, 16, 16
# per layer and rank: attention 4 · (24 + 24) = 192, all 192 + 3 · (24 + 104) = 576
SPEC = (
    f"{{width: 24, vocab: {VOCAB}, layers: [{{repeat: 2, mixer: {{heads: 2, kv_heads: 2, head: 12}}, ffn: {{hidden: 104}}}}]}}"
)
ATTENTION = {"kind": "lora", "rank": 6, "targets": ["mixer.*"]}
ALL = {"kind": "lora", "rank": 2}
RATES = (3e-3, 1e-2, 3e-2)


def trained(model: dt.Transformer, mapping: Tensor, rate: float, seed: int, steps: int = STEPS) -> float:
    """Train the weights that take a gradient; return the mean loss of the last ten steps."""
    draw = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam([weight for weight in model.parameters() if weight.requires_grad], lr=rate)
    losses: list[float] = []
    for _ in range(steps):
        tokens = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=draw)
        optimizer.zero_grad()
        loss = model.loss(tokens, mapping[tokens])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-10:]) / 10


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_all_linear_layers_beat_attention_alone(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    first, second = (torch.randint(0, VOCAB, (VOCAB,), generator=draw) for _ in range(2))
    base = dt.build(SPEC, seed=seed)
    assert trained(base, first, 1e-2, seed) < 0.2, "the base knows its map"
    best: dict[str, float] = {}
    parameters: set[int] = set()
    for name, kind in (("attention", ATTENTION), ("all", ALL)):
        losses: list[float] = []
        for rate in RATES:
            model = copy.deepcopy(base)
            parameters.add(attach(model, kind, seed=seed).parameters)
            losses.append(trained(model, second, rate, seed + 1))
        best[name] = min(losses)
    assert parameters == {2 * 2 * 576}
    assert best["all"] < best["attention"], best
