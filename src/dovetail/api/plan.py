"""plan: the layouts in which a model can be trained on many GPUs, with their memory, traffic, time and cost."""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Callable
from typing import Any

from rich.console import Group, RenderableType

from dovetail.account import longest_length
from dovetail.api.arguments import SpecLike, check_positive, read_spec, silent
from dovetail.api.result import PageResult
from dovetail.core.check import check
from dovetail.core.count import read_count
from dovetail.core.errors import SpecError, UsageError
from dovetail.core.fold import parameters
from dovetail.core.limits import MAX_LENGTH, MAX_RANKS
from dovetail.files.spec import Changes
from dovetail.planning.device import device_named
from dovetail.planning.report import Findings, layout_data, outlook
from dovetail.planning.search import Job, search
from dovetail.training.objective import next_token
from dovetail.training.plan import OptimizerKind, Precision, Recompute
from dovetail.views.plan import plan_view
from dovetail.views.plan_page import plan_page

BATCH_TOKENS = 2**24  # tokens per step where no batch is given: Llama 3's
TOP = 3  # layouts that are traced and fit


@dc.dataclass(frozen=True, repr=False)
class TrainingPlan(Findings, PageResult):
    """Layouts of a job, fastest first, and those that cannot run."""

    def to_dict(self) -> dict[str, Any]:
        found = [layout_data(self.job, one, out) for one, out in zip(self.layouts, self.outlooks, strict=True)]
        sure = None if not self.outlooks else dc.asdict(self.outlooks[0].reliability)
        return {
            "spec": self.name,
            "parameters": parameters(self.job.spec),
            "gpus": self.job.gpus,
            "device": self.job.device.name,
            "length": self.job.length,
            "batch": self.job.batch,
            "tokens": self.tokens,
            "best": found[0] if self.best is not None else None,
            "reason": self.reason,
            "reliability": sure,
            "layouts": found,
            "refused": [{"layout": dc.asdict(one.layout), "reason": one.reason} for one in self.refused],
            "not_traced": self.not_traced,
            "assumptions": self.assumptions,
        }

    def view(self, width: int) -> RenderableType:
        return Group(*plan_view(self, width))

    @property
    def title(self) -> str:
        return f"dovetail plan {self.name}"

    def body(self) -> str:
        return plan_page(self)


def plan(
    spec: SpecLike,
    *,
    gpus: int,
    device: str = "h100",
    length: int = 8192,
    batch: int | None = None,
    tokens: float | str | None = None,
    price: float | None = None,
    precision: Precision = "bf16",
    optimizer: OptimizerKind = "adamw",
    recompute: Recompute | None = None,
    tensor: int | None = None,
    sequence: int | None = None,
    shards: int | None = None,
    pipeline: int | None = None,
    top: int = TOP,
    set: Changes = (),
    swap: Changes = (),
    progress: Callable[[str], None] | None = None,
) -> TrainingPlan:
    """Plan the training of a model on many GPUs: layouts that fit, memory per rank, bytes on links, step time, days and cost.

    The program of `train` is run as one rank of the job, with a process group that exchanges nothing and tensors without
    values: memory and bytes are those of the real step. Time is a roofline on a device of the table; the result's `assumptions`
    say on what it rests. `batch` is the number of rows per step over all ranks (by default 16 M tokens), `tokens` the length of
    the run (15e12 or "15T"), `price` in dollars per GPU-hour. `tensor`, `sequence`, `shards` and `pipeline` fix an axis of the
    layout, `recompute` the activations that are computed again, by default the fastest that fits. Layouts are traced until
    `top` of them fit. `progress` is called with a line for each.
    """
    check_positive({"gpus": gpus, "length": length, "batch": batch, "price": price, "top": top})
    fixed = {"tensor": tensor, "sequence": sequence, "shards": shards, "pipeline": pipeline}
    check_positive(fixed)
    if gpus > MAX_RANKS:
        raise UsageError(f"--gpus: {gpus} is above {MAX_RANKS}")
    name, changed, _ = read_spec(spec).after(set, swap)
    check(changed)
    next_token.check(changed)
    longest = longest_length(changed)
    if length > min(MAX_LENGTH, longest or MAX_LENGTH):
        raise SpecError("--length", f"{length} is above {longest or MAX_LENGTH}, the longest sequence of the model")
    count = _count(tokens)
    job = Job(
        changed,
        gpus,
        device_named(device),
        length,
        max(1, BATCH_TOKENS // length) if batch is None else batch,
        precision,
        optimizer,
        recompute,
        {axis: size for axis, size in fixed.items() if size is not None},
    )
    found, refused, left = search(job, top, progress or silent)
    outlooks = tuple(outlook(job, one, count, price) for one in found)
    return TrainingPlan(name, job, count, tuple(found), outlooks, tuple(refused), left)


def _count(tokens: float | str | None) -> float | None:
    try:
        count = read_count(tokens) if isinstance(tokens, str) else tokens
    except ValueError as error:
        raise UsageError(f"--tokens: {error}") from error
    check_positive({"tokens": count})
    return count
