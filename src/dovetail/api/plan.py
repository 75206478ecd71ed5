"""plan: the layouts in which a model can be trained on many GPUs, with their memory, traffic, time and cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

from dovetail.api.arguments import Changes, SpecLike, read_spec, silent
from dovetail.api.options import DEVICE, PRICE, SET, SPEC, SWAP, TENSOR, Count, Length, Ranks
from dovetail.api.result import Event, Watch, unwatched
from dovetail.base.errors import SpecError
from dovetail.base.limits import MAX_LENGTH
from dovetail.base.option import BatchSize, Option
from dovetail.base.units import read_count
from dovetail.planning.device import device_named
from dovetail.training.plan import OptimizerKind, Precision, Recompute

if TYPE_CHECKING:
    from dovetail.api.plans import TrainingPlan

BATCH_TOKENS = 2**24  # tokens per step where no batch is given: Llama 3's
TOP = 3  # layouts that are traced and fit


def plan(
    spec: Annotated[SpecLike, SPEC],
    *,
    gpus: Annotated[int, Ranks("The number of GPUs to train on.")],
    device: Annotated[str, DEVICE] = "h100",
    length: Annotated[int, Length("Tokens per row.")] = 8192,
    batch: Annotated[int | None, BatchSize("Rows per step, over all ranks (default: 16 M tokens).")] = None,
    tokens: Annotated[float | str | None, Count("The tokens of the run: 15T.")] = None,
    price: Annotated[float | None, PRICE] = None,
    precision: Annotated[Precision, Option("The dtype of matrix products.")] = "bf16",
    optimizer: Annotated[OptimizerKind, Option("The optimizer.")] = "adamw",
    recompute: Annotated[
        Recompute | None,
        Option("The activations that are computed again in the backward pass (default: the fastest that fits)."),
    ] = None,
    tensor: Annotated[int | None, TENSOR] = None,
    sequence: Annotated[int | None, Ranks("Fix the ranks that share each row.")] = None,
    shards: Annotated[int | None, Ranks("Fix the ranks that share a copy of the weights (FSDP).")] = None,
    pipeline: Annotated[int | None, Ranks("Fix the pipeline stages.")] = None,
    top: Annotated[int, Option("Trace layouts until N of them fit.", low=1, high=100)] = TOP,
    set: Annotated[Changes, SET] = (),
    swap: Annotated[Changes, SWAP] = (),
    progress: Callable[[str], None] | None = None,
    watch: Watch = unwatched,
) -> TrainingPlan:
    """Plan the training of a model on many GPUs: layouts that fit, memory per rank, bytes on links, step time, days and cost.

    The program of `train` is run as one rank of the job, with a process group that exchanges nothing and tensors without
    values: memory and bytes are those of the real step. Time is a roofline on a device of the table; the result's `assumptions`
    say on what it rests. `batch` is the number of rows per step over all ranks (by default 16 M tokens), `tokens` the length of
    the run (15e12 or "15T"), `price` in dollars per GPU-hour. `tensor`, `sequence`, `shards` and `pipeline` fix an axis of the
    layout, `recompute` the activations that are computed again, by default the fastest that fits. Layouts are traced until
    `top` of them fit. `progress` is called with a line for each, `watch` with
    each as soon as it is traced.
    """
    from dovetail.account import longest_length
    from dovetail.api.plans import TrainingPlan
    from dovetail.planning.report import layout_data, outlook
    from dovetail.planning.search import Planned, PlannedJob, search
    from dovetail.spec.check import check
    from dovetail.training.objective import next_token
    from dovetail.views.plan import layout_line

    fixed = {"tensor": tensor, "sequence": sequence, "shards": shards, "pipeline": pipeline}
    name, changed, _ = read_spec(spec).after(set, swap)
    check(changed)
    next_token.check(changed)
    longest = longest_length(changed)
    if length > min(MAX_LENGTH, longest or MAX_LENGTH):
        raise SpecError("--length", f"{length} is above {longest or MAX_LENGTH}, the longest sequence of the model")
    count = None if tokens is None else read_count(tokens)
    job = PlannedJob(
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

    def traced(one: Planned) -> None:
        found = outlook(job, one, count, price)
        watch(Event("layout", layout_data(job, one, found), layout_line(job, one, found)))

    found, refused, left = search(job, top, progress or silent, traced)
    outlooks = tuple(outlook(job, one, count, price) for one in found)
    return TrainingPlan(name, job, count, tuple(found), outlooks, tuple(refused), left)
