"""Random tiny GPT-2s made by transformers: the same logits, gradients and greedy tokens, and their tensors back bit for bit."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hf_pair import Pair, check_gradients, check_greedy, check_logits, check_there_and_back


def fields(seed: int) -> dict[str, Any]:
    """All sizes different; the activation, the scale, the inner width and tying on and off."""
    draw = random.Random(2000 + seed)
    heads = draw.choice([2, 3, 5, 6])
    return {
        "n_embd": heads * draw.choice([4, 7, 9]),
        "n_head": heads,
        "n_layer": draw.choice([2, 3]),
        "n_inner": draw.choice([None, 37, 44]),
        "n_positions": 53,
        "vocab_size": draw.choice([59, 62, 71]),
        "activation_function": ["gelu_new", "relu", "gelu", "silu"][seed % 4],
        "layer_norm_epsilon": draw.choice([1e-5, 1e-2]),
        "scale_attn_weights": bool(seed % 3),
        "tie_word_embeddings": seed % 5 != 2,
        "resid_pdrop": draw.choice([0.0, 0.1]),
        "attn_pdrop": draw.choice([0.0, 0.2]),
        "embd_pdrop": draw.choice([0.0, 0.3]),
    }


@pytest.fixture(params=range(9))
def pair(request: pytest.FixtureRequest) -> Pair:
    return Pair("gpt2", fields(request.param), request.param)


def test_logits(pair: Pair) -> None:
    check_logits(pair, [17, 9, 1])


def test_gradients(pair: Pair) -> None:
    check_gradients(pair, 15)


def test_greedy(pair: Pair) -> None:
    check_greedy(pair, [9, 4, 6])


def test_there_and_back(pair: Pair) -> None:
    check_there_and_back(pair)
