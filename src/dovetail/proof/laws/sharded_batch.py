"""The batch that law 8 runs on one rank and on several: what each rank has of its rows, or of every row."""

from __future__ import annotations

import dataclasses as dc

import torch.distributed as dist
from torch import Tensor

from dovetail.construction import generator
from dovetail.core.layout import TokenLayout
from dovetail.core.loss import IGNORED
from dovetail.core.scope import Scope
from dovetail.model import Model
from dovetail.parallel.context import piece


@dc.dataclass(frozen=True)
class Batch:
    """Inputs and their layout; a source where there is an encoder; the weights of the projection."""

    inputs: Tensor
    layout: TokenLayout
    source: Tensor | None
    source_layout: TokenLayout | None
    weight: Tensor  # of each output, zero at padding
    patches: Tensor | None = None  # of images among the inputs, those of the whole batch
    source_patches: Tensor | None = None
    labels: Tensor | None = None  # of the head, −100 at padding and elsewhere

    def rows(self, group: dist.ProcessGroup) -> Batch:
        """This rank's share of the rows."""
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        source = None if self.source is None else piece(self.source, group, 0)
        source_layout = None if self.source_layout is None else self.source_layout.split_rows(ranks, rank)
        inputs, weight = piece(self.inputs, group, 0), piece(self.weight, group, 0)
        labels = None if self.labels is None else piece(self.labels, group, 0)
        own = {"inputs": inputs, "source": source, "weight": weight, "labels": labels}
        return dc.replace(self, layout=self.layout.split_rows(ranks, rank), source_layout=source_layout, **own)

    def columns(self, group: dist.ProcessGroup) -> Batch:
        """This rank's piece of every row, with the layouts of the whole rows."""
        source = None if self.source is None else piece(self.source, group)
        labels = None if self.labels is None else piece(self.labels, group, 1)
        return dc.replace(
            self, inputs=piece(self.inputs, group), source=source, weight=piece(self.weight, group, 1), labels=labels
        )


def random_labels(spec: Model, out: Tensor, layout: TokenLayout, seed: int) -> Tensor | None:
    """Random labels for these outputs; −100 at padding, and at every fifth token. None without a head."""
    if spec.head is None:
        return None
    labels = spec.head.labels(spec.axes(Scope()), tuple(out.shape[:-1]), generator(seed, "labels"))
    if spec.head.pools() or labels.shape != layout.order.shape:
        return labels
    return labels.masked_fill(~layout.real | (layout.order % 5 == 4), IGNORED)
