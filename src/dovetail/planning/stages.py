"""Trace a large step from small ones: a deep model by two shallow ones, a pipeline by its first stage and few micro-batches.

    layers = k periods of p layers, and r more         C(k) = C(3) + (k − 3) · (C(4) − C(3))

Equal layers cost the same, so that counts and bytes are affine in the number of periods. So is the memory alive in each segment
of a step (the forward or backward pass of a layer), at a fixed distance from the first or from the last layer; between these
it is affine in the index of the layer. The peak of the deep model is the largest of the extrapolated segments.
tests/planning/test_trace.py compares with traces of the whole model: they are equal, not close.

Over pipeline stages each rank has some of the layers, and micro-batches go from stage to stage (parallel/pipeline.py).

    step = stage · (M + P − 1)/M                         M micro-batches over P stages, 1F1B: all wait for P − 1 of them

The first stage is traced: it keeps the activations of most micro-batches. Layers are cut so that stages do about the same work.
Each micro-batch beyond those that fill the pipeline costs the same, so that a step of many is traced as two steps of few.
Huang et al. 2019 (GPipe); Narayanan et al. 2019 (1F1B).
"""

from __future__ import annotations

import dataclasses as dc

from dovetail.model.model import Model
from dovetail.nn.block import Block
from dovetail.parallel.layout import Layout
from dovetail.planning.cost import Memory, StepTrace
from dovetail.planning.trace import BACKWARD, FORWARD, Setting, trace_step
from dovetail.planning.watch import Staging, no_staging

# -- depth ------------------------------------------------------------------------------------------------------------


TRACED_PERIODS = 3  # periods of the shallower model: a first, a last, and one between
LONGEST_PERIOD = 8  # layers


def trace(spec: Model, layout: Layout, setting: Setting, staging: Staging = no_staging) -> StepTrace:
    """Trace a step of rank 0 of the layout; of a deep model with repeated layers by two shallow ones."""
    period = period_of(spec.layers)
    periods, rest = divmod(len(spec.layers), period)
    if periods <= TRACED_PERIODS + 1 or spec.encoder is not None or period > LONGEST_PERIOD:
        return trace_step(spec, layout, setting, staging)
    small, large = (
        trace_step(dc.replace(spec, layers=spec.layers[: n * period + rest]), layout, setting, staging)
        for n in (TRACED_PERIODS, TRACED_PERIODS + 1)
    )
    found = extrapolated(small, large, period, TRACED_PERIODS * period + rest, periods - TRACED_PERIODS)
    return found if found.cost.possible else trace_step(spec, layout, setting, staging)


def period_of(layers: tuple[Block, ...]) -> int:
    """The number of layers after which they repeat."""
    return next(n for n in range(1, len(layers) + 1) if all(a == b for a, b in zip(layers, layers[n:], strict=False)))


def extrapolated(small: StepTrace, large: StepTrace, period: int, layers: int, more: int) -> StepTrace:
    """The trace of a model that has `more` periods than the small one, which has so many layers; the large one has one more."""
    cost = small.cost.plus(large.cost.plus(small.cost, -1), more)
    low, high = _aligned(small.peaks, period, layers), _aligned(large.peaks, period, layers + period)
    peaks = {name: size + more * (high[name] - size) for name, size in low.items()}
    sizes = (a + more * (b - a) for a, b in zip(small.memory, large.memory, strict=True))
    parameters = small.parameters + more * (large.parameters - small.parameters)
    return StepTrace(parameters, cost, Memory(*sizes)._replace(peak=max(peaks.values())), peaks)


def _aligned(peaks: dict[str, int], period: int, layers: int) -> dict[str, int]:
    """The segments of layers by their distance from the first layer, where it is not of the last period, and from the last,
    where it is not of the first: each name occurs in models of any depth."""
    result: dict[str, int] = {}
    for name, size in peaks.items():
        *before, number = name.split()
        if not before or before[-1] not in (FORWARD, BACKWARD):
            result[name] = size
            continue
        if int(number) < layers - period:
            result[name] = size
        if int(number) >= period:
            result[" ".join([*before, str(int(number) - layers)])] = size
    return result


# -- stages -----------------------------------------------------------------------------------------------------------


def trace_stages(spec: Model, layout: Layout, setting: Setting, staging: Staging = no_staging) -> StepTrace:
    """Trace a step of a layout: of its first stage, where there are several."""
    if layout.pipeline == 1:
        return trace(spec, layout, setting, staging)
    filled, count = layout.pipeline + 1, setting.micro_batches
    if count <= filled + 1:
        return trace_step(spec, layout, setting, staging)
    few, more = (trace_step(spec, layout, dc.replace(setting, micro_batches=n), staging) for n in (filled, filled + 1))
    cost = few.cost.plus(more.cost.plus(few.cost, -1), count - filled)
    peak = few.memory.peak + (count - filled) * (more.memory.peak - few.memory.peak)  # rows and outputs of each stay
    return dc.replace(more, cost=cost, memory=more.memory._replace(peak=peak))


def bubble(layout: Layout, micro_batches: int) -> float:
    """Return the time that stages wait, as a fraction of the time that they work."""
    return (layout.pipeline - 1) / micro_batches
