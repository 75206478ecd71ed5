"""What ranks do in the tests of planning: a real training step, counted."""

import torch.distributed as dist

from dovetail.files.spec import from_yaml
from dovetail.parallel.layout import Layout
from dovetail.planning.cost import StepTrace
from dovetail.planning.trace import Setting, watch_step
from dovetail.planning.watch import Watch
from dovetail.training.ranks import JobRanks
from dovetail.training.step import DTYPES


def step(spec_yaml: str, layout: Layout, setting: Setting) -> StepTrace:
    """Train for one step on real tensors and real collectives."""
    ranks = JobRanks(dist.get_rank(), layout)
    model = ranks.build(from_yaml(spec_yaml), 0, DTYPES[setting.precision])
    return watch_step(model, ranks, setting, Watch())
