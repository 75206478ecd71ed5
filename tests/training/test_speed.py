"""Model FLOPs utilization: counted FLOPs against a measured peak."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dovetail.data.corpus import Batch
from dovetail.files.spec import load_spec
from dovetail.model.construction import build
from dovetail.model.model import Model
from dovetail.nn.layout import TokenLayout
from dovetail.training import loop
from dovetail.training.metrics import Speed, peak_flops, speed_of
from dovetail.training.objective import next_token
from dovetail.training.plan import Plan

CPU = torch.device("cpu")


def test_flops_of_a_token_are_three_forward_passes(tiny: Model) -> None:
    """Two layers of width 28: q 72, k and v 24, output; gate, up and down of 44; a tied or own head of 62."""
    matmul = 2 * (2 * (28 * 72 + 2 * 28 * 24 + 72 * 28 + 3 * 28 * 44) + 28 * 62)
    pairs = 16 * 17 // 2
    attention = 2 * 2 * 2 * 6 * 12 * pairs / 16  # layers, score and value products, multiply-adds
    assert speed_of(tiny, 16, torch.float32, CPU).flops_per_token == 3 * (matmul + attention)


def test_the_peak_is_that_of_a_matmul_measured_again() -> None:
    a = torch.rand(1024, 1024)
    begin = time.perf_counter()
    for _ in range(3):
        a @ a
    rate = 3 * 2 * 1024**3 / (time.perf_counter() - begin)
    assert 0.1 * rate < peak_flops(torch.float32, CPU) < 20 * rate, "other work on the machine, at most"
    assert speed_of(load_spec("llama-tiny"), 8, torch.float32, CPU, ranks=2).peak == 2 * peak_flops(torch.float32, CPU)


def test_a_step_has_the_utilization_of_its_tokens_and_seconds(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    tokens = torch.arange(48).reshape(4, 12) % 62
    batch = Batch(tokens[:, :-1], tokens[:, 1:], TokenLayout.whole(4, 11))
    more: dict[str, Any] = {"speed": Speed(flops_per_token=10.0, peak=1000.0)}
    history = loop.train(build(tiny), lambda step: batch, next_token, Plan(steps=2, quiet=True), **more)
    assert [metrics.mfu for metrics in history] == [44 * 10.0 / 1000] * 2, "44 tokens in one second of this clock"
