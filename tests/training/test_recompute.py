"""Recomputed activations: the same gradients; what is kept for the backward pass, and which products are computed again."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from dovetail import build, from_yaml
from dovetail.data.corpus import Batch
from dovetail.nn.layout import TokenLayout
from dovetail.training.objective import next_token
from dovetail.training.plan import Plan, Recompute
from dovetail.training.step import Trainer

SPEC = """
width: 96
vocab: 62
layers:
- repeat: 3
  mixer: {heads: 6, kv_heads: 2, head: 20, qk_norm: rmsnorm}
  ffn: {hidden: 260}
"""
PRODUCTS = ("mm", "addmm", "bmm", "_scaled_dot_product_flash_attention_for_cpu")


class Counted(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def measured(kind: Recompute) -> tuple[int, Counter[str]]:
    """(bytes that the forward pass leaves for the backward pass, the operations of the backward pass)."""
    trainer = Trainer(build(from_yaml(SPEC), seed=1).train(), next_token, Plan(steps=1, recompute=kind))
    tokens = torch.randint(0, 62, (4, 65), generator=torch.Generator().manual_seed(0))
    batch = Batch(tokens[:, :-1], tokens[:, 1:], TokenLayout.whole(4, 64))
    next_token(trainer.model, batch, 0, True).sum.backward()  # caches of tables are made
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        loss = next_token(trainer.model, batch, 0, True)
    with Counted() as backward:
        loss.sum.backward()
    return sum(event.self_cpu_memory_usage for event in found.key_averages()), backward.calls


def test_selective_keeps_products_and_computes_the_rest_again() -> None:
    (all_bytes, all_calls), (some_bytes, some_calls), (least_bytes, least_calls) = map(
        measured, ("none", "selective", "blocks")
    )
    assert least_bytes < 0.4 * some_bytes
    assert some_bytes < 0.7 * all_bytes
    for name in PRODUCTS:
        assert some_calls[name] == all_calls[name], "no product is computed again"
    assert least_calls["mm"] > all_calls["mm"]
    assert some_calls["rsqrt"] > all_calls["rsqrt"], "norms are"


@pytest.mark.parametrize("kind", ["selective", "blocks"])
def test_dropout_is_drawn_the_same_again(kind: Recompute) -> None:
    spec = from_yaml(SPEC.replace("hidden: 260", "hidden: 260, dropout: 0.3"))
    found = []
    for one in ("none", kind):
        trainer = Trainer(build(spec, dtype=torch.float64, seed=1).train(), next_token, Plan(steps=1, recompute=one))
        tokens = torch.arange(36).reshape(4, 9)
        trainer.step(Batch(tokens[:, :-1], tokens[:, 1:], TokenLayout.whole(4, 8)), 0, 0.0)
        found.append([weight.grad for weight in trainer.weights])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
