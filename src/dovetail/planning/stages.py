"""A step over pipeline stages: each rank has some of the layers, and micro-batches go from stage to stage.

    step = pass · (M + P − 1)/M                          M micro-batches over P stages, 1F1B: all wait for P − 1 passes
    stage s holds the activations of min(P − s, M) micro-batches at once

A stage is traced as a model of its layers, with the embedding and the head, so that it is an upper bound for stages that have
one of them or neither: what these cost is subtracted where counts allow it. Layers are spread evenly; where they do not divide,
the first and the last stage, which have the embedding and the head, get fewer.
Huang et al. 2019 (GPipe); Narayanan et al. 2019 (1F1B).
"""

from __future__ import annotations

import dataclasses as dc

from dovetail.core.errors import SpecError
from dovetail.dist.layout import Layout
from dovetail.model import Model
from dovetail.planning.cost import Collective, Cost, Group, Trace, Traffic
from dovetail.planning.depth import FEW, extrapolated, period_of, trace
from dovetail.planning.trace import FORWARD, PASS, Setting, trace_step
from dovetail.planning.watch import Staging, no_staging


@dc.dataclass(frozen=True)
class Stages:
    """The stages that decide: the one that takes longest, and the one that needs most memory."""

    slowest: tuple[Cost, ...]  # costs of a step, of which the slowest counts
    largest: Trace


def stage_layers(layers: int, stages: int) -> list[int]:
    """Return the number of layers of each stage; the last and the first have fewer where they do not divide."""
    most, missing = -(-layers // stages), -layers % stages
    order = [stages - 1, 0, *range(stages - 2, 0, -1)]
    fewer = set(order[:missing]) if stages > 1 else set[int]()
    return [most - (stage in fewer) for stage in range(stages)]


def check_stages(spec: Model, stages: int) -> None:
    """Raise SpecError for a spec that cannot be cut into so many stages."""
    if stages == 1:
        return
    if spec.encoder is not None:
        raise SpecError("encoder", "an encoder–decoder has no pipeline stages", "use tensor parallelism and FSDP")
    if spec.mtp:
        raise SpecError("mtp", "reads the embedding in the last pipeline stage", "use tensor parallelism and FSDP")
    if len(spec.layers) < stages:
        raise SpecError("layers", f"{len(spec.layers)} layers cannot be cut into {stages} pipeline stages", "use fewer stages")


def trace_stages(spec: Model, layout: Layout, setting: Setting, staging: Staging = no_staging) -> Stages:
    """Trace the stages of a layout; without a pipeline there is one."""
    if layout.pipeline == 1:
        whole = trace(spec, layout, setting, staging)
        return Stages((whole.cost,), whole)
    check_stages(spec, layout.pipeline)
    counts, alone = stage_layers(len(spec.layers), layout.pipeline), dc.replace(layout, pipeline=1)
    period = period_of(spec.layers)
    small, large = (
        trace_step(dc.replace(spec, layers=(spec.layers[:period] * n)), alone, setting, staging) for n in (FEW, FEW + 1)
    )

    def of(layers: int) -> Trace:
        return extrapolated(small, large, period, FEW * period, -(-layers // period) - FEW)

    ends = of(0).cost
    sent = _sent(spec, layout, setting)
    middle = of(max(counts)).cost.plus(ends, -1)
    costs = [of(counts[-1]).cost, *([middle] if layout.pipeline > 2 and middle.possible else [])]
    retained = (small.starts[f"{PASS} 0 {FORWARD} {period}"] - small.starts[f"{PASS} 0 {FORWARD} 0"]) // period
    sizes = [
        (of(layers).memory.peak + retained * layers * (min(layout.pipeline - stage, setting.micro_batches) - 1), layers)
        for stage, layers in enumerate(counts)
    ]
    peak, layers = max(sizes)
    largest = of(layers)
    largest = dc.replace(largest, memory=largest.memory._replace(peak=peak), cost=largest.cost.plus(sent))
    return Stages(tuple(cost.plus(sent) for cost in costs), largest)


def _sent(spec: Model, layout: Layout, setting: Setting) -> Cost:
    """The activations that a stage sends to the next, and the gradients that it sends back, per step."""
    size = setting.rows * setting.length // layout.sequence * spec.width * (2 if setting.precision == "bf16" else 4)
    group = Group(2, layout.ranks // layout.pipeline)
    return Cost(traffic={Collective("send", group): Traffic(2 * setting.micro_batches, 2 * setting.micro_batches * size)})


def bubble(layout: Layout, micro_batches: int) -> float:
    """Return the time that stages wait, as a fraction of the time that they work."""
    return (layout.pipeline - 1) / micro_batches
