"""What a plan says about its layouts: memory, bytes, seconds, days, dollars, interruptions; and the assumptions.

    M = hours per interruption of one GPU / GPUs                    mean time between interruptions
    T = √(2·C·M)                                                    the best interval between checkpoints that take C seconds
    lost = C/T + (T/2 + R)/M          goodput = 1 − lost            R: seconds from an interruption to the next step

Half an interval is trained again after an interruption, on average. Young 1974; Daly 2006. The rate is that of Llama 3 405B:
419 interruptions in 54 days on 16,384 GPUs (Grattafiori et al. 2024), one per 50,700 GPU-hours.
"""

from __future__ import annotations

import dataclasses as dc
import math
from collections.abc import Sequence
from typing import Any

from dovetail.account import account
from dovetail.planning.search import OVERLAP, Planned, PlannedJob, RefusedLayout
from dovetail.planning.stages import bubble
from dovetail.spec.fold import parameters
from dovetail.training.plan import Precision

# -- interruptions ----------------------------------------------------------------------------------------------------


HOUR, DAY = 3600.0, 86400.0
GPU_HOURS_PER_INTERRUPTION = 16384 * 54 * 24 / 419


@dc.dataclass(frozen=True)
class Reliability:
    """Checkpoints and interruptions of a run."""

    checkpoint_bytes: int
    checkpoint_seconds: float  # that training waits for one
    between_interruptions: float  # seconds
    interval: float  # seconds between checkpoints
    goodput: float  # the fraction of the time that trains, and is not trained again

    def interruptions(self, seconds: float) -> float:
        """The number of interruptions to expect in so many seconds."""
        return seconds / self.between_interruptions


def young_daly(checkpoint_seconds: float, between_interruptions: float) -> float:
    """Return the seconds between checkpoints that lose the least time."""
    return math.sqrt(2 * checkpoint_seconds * between_interruptions)


def reliability(
    checkpoint_bytes: int,
    gpus: int,
    *,
    write_bandwidth: float,
    restart_seconds: float,
    gpu_hours: float = GPU_HOURS_PER_INTERRUPTION,
) -> Reliability:
    """Return checkpoints and goodput of a run on so many GPUs, whose checkpoint is written at `write_bandwidth` bytes/s."""
    taken = max(checkpoint_bytes / write_bandwidth, 1e-3)
    between = gpu_hours * HOUR / gpus
    interval = max(young_daly(taken, between), taken)
    lost = taken / interval + (interval / 2 + restart_seconds) / between
    return Reliability(checkpoint_bytes, taken, between, interval, max(0.0, 1 - lost))


# -- layouts ----------------------------------------------------------------------------------------------------------


CHECKPOINT = 12  # bytes per parameter: float32 weight and AdamW's two moments
RESTART = 600.0  # seconds from an interruption to the next step
DTYPES: dict[Precision, str] = {"bf16": "bfloat16", "fp32": "float32"}


@dc.dataclass(frozen=True)
class Outlook:
    """A run of so many tokens in one layout; None where no number of tokens or no price is given."""

    mfu: float
    tokens_per_second: float
    days: float | None  # interruptions included
    dollars: float | None
    interruptions: float | None
    reliability: Reliability


@dc.dataclass(frozen=True, repr=False)
class PlanReport:
    """Layouts of a job: those that were traced, the ones that fit first and of these the fastest, and those that cannot run."""

    name: str
    job: PlannedJob
    tokens: float | None
    layouts: tuple[Planned, ...]
    outlooks: tuple[Outlook, ...]  # of the layouts
    refused: tuple[RefusedLayout, ...]
    not_traced: int  # slower by estimate

    @property
    def best(self) -> Planned | None:
        """The layout with the shortest step; None where none fits."""
        return self.layouts[0] if self.layouts and self.layouts[0].fits else None

    @property
    def reason(self) -> str:
        """Why the best layout is the best, or why there is none."""
        if self.best is None:
            return "no layout fits; use more GPUs, a shorter sequence, or a device with more memory"
        return _reason(self.best, self.layouts[1:], self.job)

    @property
    def assumptions(self) -> list[str]:
        """What the figures rest on."""
        return assumptions(self.job)


def outlook(job: PlannedJob, planned: Planned, tokens: float | None, price: float | None) -> Outlook:
    """Return what a run takes; `price` is in dollars per GPU-hour."""
    per_step, step = job.batch * job.length, planned.seconds.total
    work = account(job.spec, job.length).flops_per_token
    flops = 3 * (work["matmul"] + work["attention_causal"] + work.get("mtp", 0)) * per_step
    bandwidth = -(-job.gpus // job.device.node) * job.device.write
    size = CHECKPOINT * parameters(job.spec)
    sure = reliability(size, job.gpus, write_bandwidth=bandwidth, restart_seconds=RESTART)
    seconds = None if tokens is None or not sure.goodput else tokens / per_step * step / sure.goodput
    return Outlook(
        mfu=flops / step / (job.gpus * job.device.peak(DTYPES[job.precision])),
        tokens_per_second=per_step / step,
        days=None if seconds is None else seconds / DAY,
        dollars=None if seconds is None or price is None else seconds / HOUR * job.gpus * price,
        interruptions=None if seconds is None else sure.interruptions(seconds),
        reliability=sure,
    )


def layout_data(job: PlannedJob, planned: Planned, found: Outlook) -> dict[str, Any]:
    """Return a layout as plain data."""
    seconds, memory, setting = planned.seconds, planned.memory, planned.setting
    return {
        "layout": dc.asdict(planned.layout),
        "rows": setting.rows,
        "micro_batches": setting.micro_batches,
        "recompute": setting.recompute,
        "fits": planned.fits,
        "memory": {**memory._asdict(), "activations": memory.activations, "usable": int(job.device.usable)},
        "parameters_per_rank": planned.trace.parameters,
        "bytes_per_step": {"within_node": round(planned.links.within), "between_nodes": round(planned.links.between)},
        "collectives": [
            {"kind": kind, "ranks": group.ranks, "stride": group.stride, "calls": traffic.calls, "bytes": traffic.bytes}
            for (kind, group), traffic in planned.trace.cost.traffic.items()
        ],
        "flops_per_rank": planned.trace.cost.flops,
        "seconds": {**dc.asdict(seconds), "step": seconds.total},
        "limited_by": planned.limit,
        "mfu": found.mfu,
        "tokens_per_second": found.tokens_per_second,
        "days": found.days,
        "dollars": found.dollars,
        "interruptions": found.interruptions,
    }


def _reason(best: Planned, others: Sequence[Planned], job: PlannedJob) -> str:
    free = 1 - best.memory.peak / job.device.usable
    why = f"the shortest step of the layouts that fit, with {free:.0%} of the usable memory free; limited by {best.limit}"
    second = next((other for other in others if other.fits), None)
    if second is None:
        return why
    gain = second.seconds.total / best.seconds.total - 1
    return f"{why}; the next, {second.layout}, takes {gain:.1%} longer, limited by {second.limit}"


def assumptions(job: PlannedJob, restart: float = RESTART) -> list[str]:
    """Return what the figures rest on."""
    device, reached = job.device, job.device.efficiency
    products = f"products at {reached.products:.0%} of {device.peak(DTYPES[job.precision]) / 1e12:,.3g} TFLOP/s"
    memory = f"memory at {reached.bandwidth:.0%} of {device.bandwidth / 1e12:,.3g} TB/s"
    held = f"{device.memory / 1e9:,.0f} GB per GPU, of which {device.reserved / 1e9:,.0f} GB are not for tensors"
    within, between = f"{device.within / 1e9:,.3g} GB/s per GPU within", f"{device.between / 1e9:,.3g} GB/s between"
    latency = f"{device.latency.within * 1e6:.0f} or {device.latency.between * 1e6:.0f} µs"
    hours, minutes = f"{GPU_HOURS_PER_INTERRUPTION:,.0f} GPU-hours", f"{restart / 60:.0f} minutes"
    return [
        f"{held}; {products}, {memory}",
        f"nodes of {device.node}: {within}, {between}, at {reached.links:.0%}; a collective takes {latency} beside its bytes",
        "kernels run one by one, unfused, as they do on the CPU, where the step was traced",
        f"collectives of weights and gradients run during {OVERLAP:.0%} of compute, those of activations do not",
        "pipeline stages run 1F1B; the first is traced, which keeps most activations, and the others take as long",
        f"one interruption per {hours} (Llama 3 405B), and {minutes} to the next step",
        f"training waits while a checkpoint is written, at {device.write / 1e9:g} GB/s per node",
    ]


def bubble_of(planned: Planned) -> float:
    """Return the fraction of a step in which pipeline stages wait."""
    idle = bubble(planned.layout, planned.setting.micro_batches)
    return idle / (1 + idle)
