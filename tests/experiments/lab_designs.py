"""Designs of labs for the tests: a base of a few thousand parameters."""

from __future__ import annotations

from typing import Any

BASE = """
width: 16
vocab: 64
layers: [{repeat: 4, mixer: {heads: 4, kv_heads: 4, head: 4}, ffn: {hidden: 40}}]
head: {kind: lm, tied: false}
"""


def lab(**keys: Any) -> dict[str, Any]:
    """A design with two arms."""
    arms = {
        "gqa": {"set": {"layers.*.mixer.kv_heads": 2}},
        "mamba2": {"swap": {"layers.1::2.mixer": {"kind": "mamba2", "head": 8, "state_size": 8}}},
    }
    basic = {"base": BASE, "arms": arms, "data": {"text": "plays.txt"}, "budget": {"tokens": "2k"}, "train": {"length": 32}}
    return {**basic, **keys}
