"""A small base model with a tokenizer, in a directory, and rows to tune it on."""

from __future__ import annotations

import json
from pathlib import Path

import torch

import dovetail as dt
from dovetail.decoding.generation import Vocabulary
from dovetail.text.learn import learn

SPEC = """
width: 24
vocab: 300
layers: [{repeat: 2, mixer: {heads: 2, kv_heads: 1, head: 12}, ffn: {hidden: 40}}]
"""
TEXT = "user: What is it? assistant: It is blue, red, green. say yes or no\n" * 30


def base(place: Path, seed: int = 0, spec: str = SPEC) -> Path:
    """Write a model with random weights, enlarged so that its answers differ, and its tokenizer."""
    model = dt.build(spec, seed=seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3.0 if weight.dim() > 1 else 1.0)
    model.vocabulary = Vocabulary(learn(TEXT, 300))
    dt.save(model, place)
    return place


def write_rows(path: Path, rows: list[dict[str, object]]) -> Path:
    """Write rows as JSON Lines."""
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def chats(path: Path, count: int = 40) -> Path:
    """Conversations of one or two answers."""
    colors = ("blue", "red", "green")
    rows: list[dict[str, object]] = []
    for i in range(count):
        turns = [{"role": "user", "content": f"What is {i}?"}, {"role": "assistant", "content": f"It is {colors[i % 3]}."}]
        again = [{"role": "user", "content": "say yes"}, {"role": "assistant", "content": "yes"}]
        rows.append({"messages": turns + (again if i % 2 else [])})
    return write_rows(path, rows)
