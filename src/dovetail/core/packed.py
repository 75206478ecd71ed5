"""Packed weights: queries, keys and values in one matrix, group by group.

(kv_heads · slots · head, inp)          slots of a group: its queries, then its key, then its value
"""

from __future__ import annotations

from torch import Tensor

from dovetail.core.scope import Scope
from dovetail.core.weight import PACKED_AXIS, Weight


def piece(packed: Tensor, dim: int, which: int) -> Tensor:
    """A view of the queries (0), the keys (1) or the values (2); `dim` is the dimension of the slots."""
    queries = packed.shape[dim] - 2
    return packed.narrow(dim, 0, queries) if which == 0 else packed.narrow(dim, queries + which - 1, 1)


def matrices(tensor: Tensor, weight: Weight, scope: Scope) -> list[Tensor]:
    """Views of the matrices in a tensor of a weight's shape: itself (batch…, out, inp); of a packed one its queries, keys and
    values, each (groups, slots, head, inp), where all but the last dimension are `out`."""
    if not weight.packs:
        return [tensor]
    shaped = tensor.unflatten(0, [scope.size(axis) for axis in weight.out])
    return [piece(shaped, weight.out.index(PACKED_AXIS), which) for which in range(len(weight.packs))]
