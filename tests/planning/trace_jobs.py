"""What ranks do in the tests of planning: a real training step, counted."""

import torch.distributed as dist

from dovetail.files.spec import from_yaml
from dovetail.parallel.layout import Layout
from dovetail.planning.cost import Trace
from dovetail.planning.trace import Setting, watch_step
from dovetail.planning.watch import Watch
from dovetail.training.ranks import Ranks
from dovetail.training.step import DTYPES


def step(spec_yaml: str, layout: Layout, setting: Setting) -> Trace:
    """Train for one step on real tensors and real collectives."""
    ranks = Ranks(dist.get_rank(), layout)
    model = ranks.build(from_yaml(spec_yaml), 0, DTYPES[setting.precision])
    return watch_step(model, ranks, setting, Watch())
