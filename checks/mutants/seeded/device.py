"""Seeded bugs of devices: tensors made on the CPU, values read from a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dovetail.files.spec import from_yaml
from dovetail.nn import rows
from dovetail.nn.layout import TokenLayout
from dovetail.ops import attend, pooling
from dovetail.proof.laws.mutant import Mutant, instead, spec
from dovetail.state import frame
from dovetail.state.slots import Paged

_dense, _slot, _rows_of = attend.dense, Paged.slot, rows._rows_of


def mask_on_the_cpu(mask: Any, q: TokenLayout, k: TokenLayout, heads: Tensor) -> tuple[Tensor, Tensor]:
    visible, empty = _dense(mask, q, k, heads)
    return visible & torch.ones(visible.shape[-2:], dtype=torch.bool), empty


def positions_on_the_cpu(positions: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(list(positions), dtype=torch.long)


def page_table_on_the_cpu(self: Paged, row: Tensor, position: Tensor) -> Tensor:
    self.table = torch.zeros(self.table.shape, dtype=torch.long)
    return _slot(self, row, position)


def longest_row_read(layout: TokenLayout) -> rows.SequenceRows:
    if layout.row is not None:
        int(layout.row.max())
    return _rows_of(layout)


def documents_read(layout: TokenLayout) -> tuple[Tensor, int] | None:
    return None if int(layout.seg.amax()) < 1 else pooling.documents_of(layout)


def mutants() -> list[Mutant]:
    """The seeded bugs of this area."""
    long = spec().set("layers.*.mixer.mask", ["causal", {"kind": "window", "size": 5}]).set("layers.*.mixer.softcap", 2.0)
    recurrent = from_yaml("{width: 28, vocab: 62, layers: [{mixer: {kind: gla, heads: 2}, ffn: {hidden: 44}}]}")
    pooled = spec().set("head", {"kind": "classifier", "pooling": "mean"})
    return [
        Mutant("a mask is made on the CPU", "device", instead(attend, "dense", mask_on_the_cpu)),
        Mutant("positions of a ring are made on the CPU", "device", instead(frame, "_tensor", positions_on_the_cpu), long),
        Mutant("a page table is on the CPU", "device", instead(Paged, "slot", page_table_on_the_cpu)),
        Mutant("the longest row is read from the device", "device", instead(rows, "_rows_of", longest_row_read), recurrent),
        Mutant("documents are counted on the device", "device", instead(pooling, "documents_of", documents_read), pooled),
    ]
