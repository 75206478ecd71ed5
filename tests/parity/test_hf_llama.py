"""Random tiny Llamas made by transformers: the same logits, gradients and greedy tokens, and their tensors back bit for bit."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hf_pair import Pair, check_gradients, check_greedy, check_logits, check_there_and_back

ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.5},
    "dynamic": {"factor": 2.0},
    "llama3": {"factor": 4.0, "original_max_position_embeddings": 16, "low_freq_factor": 0.5, "high_freq_factor": 3.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 24, "beta_fast": 4.0, "beta_slow": 0.3},
    "longrope": {"factor": 4.0, "original_max_position_embeddings": 14},
}


def fields(seed: int, rope: str) -> dict[str, Any]:
    """All sizes different; heads grouped in various ways; biases and tying on and off."""
    draw = random.Random(1000 + seed)
    groups, shared = draw.choice([(1, 6), (2, 3), (3, 2), (2, 2), (5, 1)])
    heads, head = groups * shared, draw.choice([6, 8, 10, 14])
    parameters: dict[str, Any] = {"rope_type": rope, "rope_theta": draw.choice([10000.0, 500.0, 123.0]), **ROPES[rope]}
    if rope == "longrope":
        parameters["short_factor"] = [1.0 + 0.1 * i for i in range(head // 2)]
        parameters["long_factor"] = [2.0 + 0.3 * i for i in range(head // 2)]
    return {
        "hidden_size": heads * draw.choice([4, 5, 7]),
        "intermediate_size": draw.choice([37, 44, 52]),
        "num_hidden_layers": draw.choice([2, 3]),
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": head,
        "vocab_size": draw.choice([59, 62, 71]),
        "max_position_embeddings": 12 if rope == "dynamic" else 96,
        "rms_norm_eps": draw.choice([1e-6, 1e-5, 1e-2]),
        "hidden_act": draw.choice(["silu", "gelu", "gelu_pytorch_tanh", "relu"]),
        "attention_bias": bool(seed % 2),
        "mlp_bias": bool(seed // 2 % 2),
        "tie_word_embeddings": bool(seed // 4 % 2),
        "rope_parameters": parameters,
    }


CASES = [(seed, list(ROPES)[seed % len(ROPES)]) for seed in range(12)]


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def pair(request: pytest.FixtureRequest) -> Pair:
    seed, rope = request.param
    return Pair("llama", fields(seed, rope), seed)


def stretches(pair: Pair) -> bool:
    """Whether the angles depend on the length of the text now, which theirs take from the longest row of a batch."""
    scaling = pair.spec.layers[0].mixer.position.scaling  # type: ignore[attr-defined]
    return scaling is not None and scaling.varies


def test_logits(pair: Pair) -> None:
    check_logits(pair, [17, 17] if stretches(pair) else [17, 9, 1])


def test_gradients(pair: Pair) -> None:
    check_gradients(pair, 15)


def test_greedy(pair: Pair) -> None:
    check_greedy(pair, [9, 9] if stretches(pair) else [9, 4, 6])


def test_there_and_back(pair: Pair) -> None:
    check_there_and_back(pair)
