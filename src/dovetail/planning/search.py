"""Search the layouts of a job: all that the spec, the batch and the memory allow, ranked by formula, the best of them traced.

    gpus = pipeline × replicas × shards × sequence × tensor
      ├─ refused: a weight, the rows or the length cannot be divided, or weights, gradients, optimizer state do not fit
      ├─ ranked by the time that formula.py estimates
      └─ the first few are traced: memory, bytes and time are those of the real program

Tensor-parallel ranks stay within a node, since they communicate most.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Callable, Iterator
from typing import NamedTuple

from dovetail.base.errors import SpecError
from dovetail.model.model import Model
from dovetail.nn.groups import Mixer
from dovetail.parallel.context import check_split
from dovetail.parallel.layout import Layout
from dovetail.parallel.stage import cut_layers
from dovetail.planning.cost import Memory, StepTrace
from dovetail.planning.device import Device
from dovetail.planning.formula import Formula
from dovetail.planning.roofline import Links, Seconds, link_bytes, step_seconds
from dovetail.planning.stages import bubble, trace_stages
from dovetail.planning.trace import Setting
from dovetail.spec.part import walk_spec
from dovetail.training.plan import OptimizerKind, Precision, Recompute

ROWS = (1, 2)  # of a micro-batch on one rank
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "blocks")
TOLERANCE = 1.2  # estimated memory ÷ usable, up to which a layout is traced
CHUNK = 4096  # tokens of a row that a rank has at the least: shorter chunks communicate more than they compute
OVERLAP = 0.9  # of compute, during which FSDP's collectives run


@dc.dataclass(frozen=True)
class PlannedJob:
    """What is to be trained, and on what."""

    spec: Model
    gpus: int
    device: Device
    length: int
    batch: int  # rows per step, of all ranks
    precision: Precision = "bf16"
    optimizer: OptimizerKind = "adamw"
    recompute: Recompute | None = None  # None: the fastest that fits
    fixed: dict[str, int] = dc.field(default_factory=dict)  # axes that the caller has chosen


class RankedLayout(NamedTuple):
    """A layout with its micro-batches, and the estimated seconds of a step."""

    layout: Layout
    setting: Setting
    about: float


class RefusedLayout(NamedTuple):
    """A layout that cannot run, and why."""

    layout: Layout
    reason: str


@dc.dataclass(frozen=True)
class Planned:
    """A layout that was traced: one rank's memory, bytes on links, and the time of a step."""

    layout: Layout
    setting: Setting
    trace: StepTrace
    memory: Memory
    links: Links
    seconds: Seconds
    fits: bool

    @property
    def limit(self) -> str:
        """What takes most of the time that products do not."""
        shares = {"pipeline bubble": self.seconds.bubble, "communication that compute does not hide": self.seconds.exposed}
        name, most = max(shares.items(), key=lambda item: item[1])
        return name if most > 0.2 * self.seconds.compute else "compute"


def layouts(job: PlannedJob) -> Iterator[Layout]:
    """Yield the layouts of so many GPUs, in powers of two along each axis, or as the caller has fixed them; a chunk of a row
    has at least CHUNK tokens."""
    for tensor in _sizes(job, "tensor", job.device.node):
        for pipeline in _sizes(job, "pipeline", len(job.spec.layers)):
            for sequence in _sizes(job, "sequence", job.length // CHUNK):
                data, rest = divmod(job.gpus, tensor * pipeline * sequence)
                if rest or not data:
                    continue
                near = max(1, job.device.node // (tensor * sequence))  # FSDP within a node, and replicas over nodes
                sizes = {job.fixed["shards"]} if "shards" in job.fixed else {data, near}
                for shards in sorted(sizes):
                    if data % shards == 0:
                        yield Layout(pipeline, data // shards, shards, sequence, tensor)


def _sizes(job: PlannedJob, axis: str, most: int) -> list[int]:
    if axis in job.fixed:
        return [job.fixed[axis]]
    return [2**power for power in range(job.gpus.bit_length()) if 2**power <= max(1, min(most, job.gpus))]


def candidates(job: PlannedJob) -> tuple[list[RankedLayout], list[RefusedLayout]]:
    """Return the candidates, fastest first by estimate, and the layouts that cannot run."""
    found: list[RankedLayout] = []
    refused: list[RefusedLayout] = []
    formula = Formula(job.spec, job.length)
    for layout in layouts(job):
        try:
            check_layout(job, layout)
            weights = formula.weights(layout)
        except SpecError as error:
            refused.append(RefusedLayout(layout, str(error)))
            continue
        if job.batch // layout.data < layout.pipeline:
            rows = f"{job.batch // layout.data} rows per step"
            refused.append(
                RefusedLayout(layout, f"--batch: {rows} are fewer micro-batches than {layout.pipeline} pipeline stages")
            )
            continue
        needed = {setting: formula.least_memory(weights, layout, setting) for setting in _settings(job, layout)}
        able = [setting for setting, size in needed.items() if size <= TOLERANCE * job.device.usable]
        if able:
            ranked = [RankedLayout(layout, one, formula.about_seconds(weights, layout, one, job.device)) for one in able]
            found.append(min(ranked, key=lambda one: one.about))
        else:
            least, usable = (f"{size / 1e9:,.0f} GB" for size in (min(needed.values()), job.device.usable))
            refused.append(RefusedLayout(layout, f"needs about {least} per rank at the least; {usable} are usable"))
    return sorted(found, key=lambda one: one.about), refused


def check_layout(job: PlannedJob, layout: Layout) -> None:
    """Raise SpecError for a layout that the spec, the batch or the length does not allow."""
    if job.batch % layout.data:
        raise SpecError("--batch", f"{job.batch} rows cannot be shared by {layout.data} ranks", "use a multiple")
    if layout.sequence > 1:
        _check_split(job)
        if job.length % layout.sequence:
            problem = f"{job.length} tokens cannot be cut into {layout.sequence} equal chunks"
            raise SpecError("--length", problem, "use a multiple")
    if layout.pipeline > 1:
        cut_layers(job.spec, layout.pipeline)


def _check_split(job: PlannedJob) -> None:
    """Raise SpecError for a part that needs a whole row, or in which the ranks of a split sequence run one after another."""
    check_split(job.spec)
    for path, part in walk_spec(job.spec):
        if isinstance(part, Mixer) and part.recurrent:
            problem = f"{part.kind} passes its state from rank to rank: those of a split sequence wait for each other"
            raise SpecError(path, problem, "split rows over ranks instead: data")


def _settings(job: PlannedJob, layout: Layout) -> Iterator[Setting]:
    share = job.batch // layout.data
    for rows in ROWS:
        if share % rows == 0 and share // rows >= layout.pipeline:
            for recompute in RECOMPUTE if job.recompute is None else (job.recompute,):
                yield Setting(rows, job.length, share // rows, job.precision, recompute, job.optimizer)


def search(
    job: PlannedJob, top: int, progress: Callable[[str], None], watch: Callable[[Planned], None]
) -> tuple[list[Planned], list[RefusedLayout], int]:
    """Trace the best candidates until `top` of them fit; return those that were traced, fastest first, the layouts that cannot
    run, and how many candidates were not traced. `watch` is called with each when it is traced."""
    ranked, refused = candidates(job)
    planned: list[Planned] = []
    queue = list(ranked)
    tried = 0
    while queue and sum(one.fits for one in planned) < top and tried < 2 * top:
        one = queue.pop(0)
        progress(f"tracing {one.layout}")
        planned.append(plan_layout(job, one.layout, one.setting))
        watch(planned[-1])
        tried += 1
        thriftier = _thriftier(job, one)
        if not planned[-1].fits and thriftier is not None:
            queue.insert(0, thriftier)
    return sorted(planned, key=lambda one: (not one.fits, one.seconds.total)), refused, len(queue)


def _thriftier(job: PlannedJob, layout: RankedLayout) -> RankedLayout | None:
    """The candidate with the next smaller memory: more is recomputed."""
    kinds = RECOMPUTE if job.recompute is None else (job.recompute,)
    later = kinds[kinds.index(layout.setting.recompute) + 1 :]
    return layout._replace(setting=dc.replace(layout.setting, recompute=later[0])) if later else None


def plan_layout(job: PlannedJob, layout: Layout, setting: Setting) -> Planned:
    """Trace a layout, and time it."""
    trace = trace_stages(job.spec, layout, setting)
    seconds = step_seconds(trace.cost, layout, job.device, OVERLAP)
    seconds = dc.replace(seconds, bubble=seconds.total * bubble(layout, setting.micro_batches))
    fits = trace.memory.peak <= job.device.usable
    return Planned(layout, setting, trace, trace.memory, link_bytes(trace.cost, job.device.node), seconds, fits)
