"""A step over pipeline stages: each rank has some of the layers, and micro-batches go from stage to stage
(parallel/pipeline.py).

    step = stage · (M + P − 1)/M                         M micro-batches over P stages, 1F1B: all wait for P − 1 of them

The first stage is traced: it keeps the activations of most micro-batches. Layers are cut so that stages do about the same work.
Each micro-batch beyond those that fill the pipeline costs the same, so that a step of many is traced as two steps of few.
Huang et al. 2019 (GPipe); Narayanan et al. 2019 (1F1B).
"""

from __future__ import annotations

import dataclasses as dc

from dovetail.model import Model
from dovetail.parallel.layout import Layout
from dovetail.planning.cost import Trace
from dovetail.planning.depth import trace
from dovetail.planning.trace import Setting, trace_step
from dovetail.planning.watch import Staging, no_staging


def trace_stages(spec: Model, layout: Layout, setting: Setting, staging: Staging = no_staging) -> Trace:
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
