"""Model FLOPs utilization: what a step computes, against what this machine can.

    MFU = FLOPs per token · tokens/s / (peak · ranks)                                           Chowdhery et al. 2022 (PaLM)
    FLOPs per token = 3 · (matmul + attention over the pairs that masks leave)                  forward 1, backward 2

Recomputed activations do not count. The peak is measured: the fastest of several square matmuls in the dtype of the run.
"""

from __future__ import annotations

import functools
import time
from typing import NamedTuple

import torch

from dovetail.account import account
from dovetail.model import Model
from dovetail.training.plan import Precision

SECONDS = 0.2  # of measuring
SIZES = {"cpu": 1024}  # of the matrices
LARGE = 8192  # on an accelerator


class Speed(NamedTuple):
    """The FLOPs of a token in training, and the FLOP/s that all ranks can do."""

    flops_per_token: float
    peak: float

    def mfu(self, tokens: int, seconds: float) -> float:
        """The fraction of the peak at which so many tokens were trained on in so many seconds."""
        return self.flops_per_token * tokens / max(seconds, 1e-9) / self.peak


def speed_of(spec: Model, length: int, dtype: torch.dtype, device: torch.device, ranks: int = 1) -> Speed:
    """Measure the peak of this machine, and count the FLOPs of a token in sequences of this length."""
    work = account(spec, length).flops_per_token
    forward = work["matmul"] + work["attention_causal"] + work.get("mtp", 0)
    return Speed(3 * forward, ranks * peak_flops(dtype, device))


@functools.cache
def peak_flops(dtype: torch.dtype, device: torch.device) -> float:
    """The FLOP/s of the fastest of several matmuls, measured once per process."""
    size = SIZES.get(device.type, LARGE)
    a, b = (torch.full((size, size), 1e-3, dtype=dtype, device=device) for _ in range(2))
    _matmul_seconds(a[:64], b)  # kernels are chosen and threads started
    begin, best = time.perf_counter(), float("inf")
    while best == float("inf") or time.perf_counter() - begin < SECONDS:
        best = min(best, _matmul_seconds(a, b))
    return 2 * size**3 / best


def _matmul_seconds(a: torch.Tensor, b: torch.Tensor) -> float:
    begin = time.perf_counter()
    product = a @ b
    product[0, 0].item()  # waits for the device
    return time.perf_counter() - begin


def faster_precision(device: torch.device) -> Precision:
    """bf16 where its matmuls are faster than those of float32 on this device, else fp32."""
    return "bf16" if peak_flops(torch.bfloat16, device) > peak_flops(torch.float32, device) else "fp32"
