"""Model FLOPs utilization: what a step computes, against what this machine can.

    MFU = FLOPs per token · tokens/s / (peak · ranks)                                           Chowdhery et al. 2022 (PaLM)
    FLOPs per token = 3 · (matmul + attention over the pairs that masks leave)                  forward 1, backward 2

Recomputed activations do not count. The peak is measured: the fastest of several square matmuls in the dtype of the run.
"""

from __future__ import annotations

import dataclasses as dc
import functools
import time
from collections.abc import Callable

import torch

from dovetail.account import account
from dovetail.model import Model
from dovetail.training.plan import Precision

SECONDS = 0.2  # of measuring
SIZES = {"cpu": 1024}  # of the matrices
TRIES = 3  # measurements of the peak after the first
LARGE = 8192  # on an accelerator


@dc.dataclass
class Speed:
    """The FLOPs of a token in training, and the FLOP/s that all ranks can do. `measure` measures the peak again."""

    flops_per_token: float
    peak: float
    measure: Callable[[], float] | None = None
    tries: int = TRIES

    def mfu(self, tokens: int, seconds: float) -> float | None:
        """The fraction of the peak at which the tokens were trained on in this time. No step is faster than the peak: where one
        is, other processes ran while the peak was measured. It is measured again; None if it is still too low."""
        rate = self.flops_per_token * tokens / max(seconds, 1e-9)
        if rate > self.peak and self.measure is not None and self.tries:
            self.tries -= 1
            self.peak = max(self.peak, self.measure())
        return rate / self.peak if rate <= self.peak else None


def speed_of(spec: Model, length: int, dtype: torch.dtype, device: torch.device, ranks: int = 1) -> Speed:
    """Measure the peak of this machine, and count the FLOPs of a token in sequences of this length."""
    work = account(spec, length).flops_per_token
    forward = work["matmul"] + work["attention_causal"] + work.get("mtp", 0)

    def measure() -> float:
        peak_flops.cache_clear()
        return ranks * peak_flops(dtype, device)

    return Speed(3 * forward, ranks * peak_flops(dtype, device), measure)


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
