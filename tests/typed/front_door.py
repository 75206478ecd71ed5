"""What a type checker knows of the public names; `tests/test_typed.py` runs pyright on this file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import assert_type

import torch
from torch import Tensor

import dovetail as dt
from dovetail.look.record import Trace

model = dt.build("llama-tiny")
assert_type(model, dt.Transformer)
ids = torch.zeros(1, 3, dtype=torch.long)
assert_type(model(ids), Tensor)
assert_type(model(ids, attention_mask=ids), Tensor)
assert_type(model.loss(ids), Tensor)
assert_type(model.generate("text", 3), str)
assert_type(model.generate("text", 3, stream=True), Iterator[str])
assert_type(model.generate([1, 2], 3), list[int])
assert_type(model.generate([1, 2], 3, stream=True, temperature=0.5), Iterator[int])
assert_type(model.trace(ids, "head.logits"), Trace)
assert_type(model.spec, dt.Model)
assert_type(model.spec.swap("position", dt.parts.Alibi()), dt.Model)
mixer = model.spec.layers[0].mixer
if isinstance(mixer, dt.parts.Attention):
    assert_type(mixer.heads, int)
    assert_type(mixer.kv_heads, int | None)
assert_type(dt.load("directory", dtype="bfloat16"), dt.Transformer)

model(ids, attention_maks=ids)  # pyright: ignore[reportCallIssue]
model.generate("text", temprature=1.0)  # pyright: ignore[reportCallIssue]
