"""Rotary settings in config.json: what one number of ours is there."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import dovetail as dt

SPEC = """
width: 48
vocab: 62
layers:
- mixer:
    heads: 4
    head: 12
    position: {kind: rope, scaling: {kind: longrope, short: [1.5], long: [3.0], original: 16, factor: 4.0}}
  ffn: {hidden: 72}
"""


def test_one_factor_of_longrope_is_written_for_each_pair(tmp_path: Path) -> None:
    model = dt.build(dt.from_yaml(SPEC), seed=3)
    dt.save(model, tmp_path / "own")
    dt.export(tmp_path / "own", tmp_path / "exported")
    config = json.loads((tmp_path / "exported" / "config.json").read_text())
    rope = config.get("rope_parameters") or config["rope_scaling"]
    assert rope["short_factor"] == [1.5] * 6
    assert rope["long_factor"] == [3.0] * 6
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", attn_implementation="eager", dtype=torch.float32)
    for tokens in (12, 24):  # up to the original length, and beyond
        ids = torch.randint(62, (2, tokens))
        torch.testing.assert_close(model(ids), theirs(ids).logits, atol=1e-5, rtol=1e-5)
