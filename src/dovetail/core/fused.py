"""Other forms of plain linear leaves: joined for speed, or invariant to the batch.

Joined leaves: linear leaves that read one input, multiplied at once in inference.

    W = [W_q; W_k; W_v]   one storage, of which the three weights are views        [q, k, v] = x Wᵀ, split

A part names such leaves in `together()`, and its module calls them by `core/linear.py:together`. `join(model)` makes the
storages. Nothing is to be undone before saving or training: each leaf keeps its own weight, and an update in place writes to
the storage. The storages are ordinary tensors, also where generation, in inference mode, makes them: weights that are
inference tensors could never be trained again.

Invariant leaves: a token's bits do not depend on how many other tokens are in the batch.

    y = x Wᵀ in tiles of 16 rows, the last one filled with zeros

A matmul sums in an order that its kernel chooses by the number of rows: on a CPU, F.linear of one row and of three differ in
the last bits. Every tile has one shape, so every row is summed in one order, whichever rows are beside it. A token that is
decoded alone costs as much as sixteen. He et al. 2025 (batch invariance).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dovetail.core.host import read
from dovetail.core.linear import Joint, Linear, Rows, addresses
from dovetail.core.module import Module, holder


@torch.inference_mode(False)
@torch.no_grad()
def join(model: nn.Module) -> int:
    """Join the leaves of every module of a model, in place; return how many leaves are joined."""
    joints: dict[tuple[int, ...], Joint] = {}  # layers that share their weights share this, too
    return sum(_join(one, joints) for one in model.modules() if isinstance(one, Module) and one.part.together())


def _join(module: Module, joints: dict[tuple[int, ...], Joint]) -> int:
    leaves = [leaf for name in module.part.together() if type(leaf := module.get_submodule(name)) is Linear]
    alike = {(leaf.bias is None, leaf.weight.dtype, leaf.weight.device, leaf.in_features) for leaf in leaves}
    if len(leaves) < len(module.part.together()) or len(alike) > 1:
        return 0
    there = addresses(leaves)
    if module.joint is not None and module.joint.addresses == there:  # a compiled graph may hold these weights
        joints[there] = module.joint
    if there in joints:
        module.joint = joints[there]
        return len(leaves)
    sizes = tuple(leaf.out_features for leaf in leaves)
    weight = torch.cat([leaf.weight for leaf in leaves])
    bias = torch.cat([leaf.bias for leaf in leaves if leaf.bias is not None]) if leaves[0].bias is not None else None
    for leaf, own in zip(leaves, weight.split(sizes), strict=True):
        leaf.weight.data = own
    for leaf, own in zip(leaves, () if bias is None else bias.split(sizes), strict=False):
        leaf.bias.data = own
    module.joint = Joint(weight, bias, sizes, addresses(leaves))
    joints[module.joint.addresses] = module.joint
    return len(leaves)


TILE = 16  # rows: the fewest for which torch's kernels of all dtypes sum every row alike (tests/core/test_invariant.py)


class InvariantLinear(Linear):
    """A plain leaf that multiplies tile by tile; it shares the parameters of the leaf that it replaces."""

    def __init__(self, of: Linear) -> None:
        nn.Module.__init__(self)
        self.adapter = of.adapter
        self.in_features, self.out_features = of.in_features, of.out_features
        self.weight = of.weight
        self.register_parameter("bias", of.bias)

    def multiply(self, input: Tensor) -> Tensor:
        y = tiled(input.flatten(0, -2), self.weight.to(input.dtype)).view(*input.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def multiply_grouped(self, x: Tensor, rows: Rows) -> Tensor:  # rows of experts on other ranks are zero
        y, begin = x.new_zeros(len(x), self.out_features), 0
        for matrix, end in zip(self.weight, read(rows.ends), strict=True):
            y[begin:end] = tiled(x[begin:end], matrix)
            begin = end
        return y if self.bias is None else y + self.bias.index_select(0, rows.expert)


def tiled(x: Tensor, weight: Tensor) -> Tensor:
    """x (rows, inp) Wᵀ, tile by tile."""
    if not len(x):
        return x.new_zeros(0, weight.shape[0])
    filled = F.pad(x, (0, 0, 0, -len(x) % TILE))
    return torch.cat([F.linear(tile, weight) for tile in filled.split(TILE)])[: len(x)]


def make_invariant(model: nn.Module) -> int:
    """Replace the plain linear leaves of a model, in place; return how many."""
    leaves = [path for path, module in model.named_modules() if type(module) is Linear]
    for path in leaves:
        owner, name = holder(model, path)
        owner.add_module(name, InvariantLinear(model.get_submodule(path)))  # type: ignore[arg-type]
    return len(leaves)
