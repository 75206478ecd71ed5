"""Other forms of plain linear leaves: fused for speed, or invariant to the batch.

Fused leaves: linear leaves that read one input, multiplied at once in inference (fused projections).

    W = [W_q; W_k; W_v]   one tensor, of which the three weights are views        [q, k, v] = x Wᵀ, split

A module names such leaves in `fused`, and calls them by `multiply_fused` (nn/linear.py). `fuse(model)` makes the tensors.
Nothing is to be undone before saving or training: each leaf keeps its own weight, and an update in place writes to the fused
tensor. Fused tensors are ordinary ones, also where generation, in inference mode, makes them: weights that are inference
tensors could never be trained again.

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

from dovetail.nn.ctx import Ctx
from dovetail.nn.host import read
from dovetail.nn.linear import Dense, FusedWeight, Linear, Rows, addresses, is_plain
from dovetail.nn.module import Module


@torch.inference_mode(False)
@torch.no_grad()
def fuse(model: nn.Module) -> int:
    """Fuse the leaves of every module of a model, in place; return how many leaves are fused."""
    made: dict[tuple[int, ...], FusedWeight] = {}  # layers that share their weights share this, too
    return sum(_fuse(module, made) for module in model.modules() if isinstance(module, Module) and module.fused)


def _fuse(module: Module, made: dict[tuple[int, ...], FusedWeight]) -> int:
    leaves = [leaf for name in module.fused if is_plain(leaf := module.get_submodule(name))]
    alike = {(leaf.bias is None, leaf.weight.dtype, leaf.weight.device, leaf.in_features) for leaf in leaves}
    if len(leaves) < len(module.fused) or len(alike) > 1:
        return 0
    there = addresses(leaves)
    if module.fused_weight is not None and module.fused_weight.addresses == there:  # a compiled graph may hold these weights
        made[there] = module.fused_weight
    if there in made:
        module.fused_weight = made[there]
        return len(leaves)
    sizes = tuple(leaf.out_features for leaf in leaves)
    weight = torch.cat([leaf.weight for leaf in leaves])
    bias = torch.cat([leaf.bias for leaf in leaves if leaf.bias is not None]) if leaves[0].bias is not None else None
    for leaf, own in zip(leaves, weight.split(sizes), strict=True):
        leaf.weight.data = own
    for leaf, own in zip(leaves, () if bias is None else bias.split(sizes), strict=False):
        leaf.bias.data = own
    module.fused_weight = FusedWeight(weight, bias, sizes, addresses(leaves))
    made[module.fused_weight.addresses] = module.fused_weight
    return len(leaves)


TILE = 16  # rows: the fewest for which torch's kernels of all dtypes sum every row alike (tests/nn/test_invariant.py)


class Tiled(Dense):
    """A dense W, by which a leaf multiplies tile by tile."""

    def multiply(self, leaf: Linear, x: Tensor, ctx: Ctx | None) -> Tensor:
        y = tiled(x.flatten(0, -2), leaf.weight.to(x.dtype)).view(*x.shape[:-1], leaf.out_features)
        return y if leaf.bias is None else y + leaf.bias.to(y.dtype)

    def grouped(
        self, leaf: Linear, x: Tensor, rows: Rows, ctx: Ctx | None
    ) -> Tensor:  # rows of experts on other ranks are zero
        y, begin = x.new_zeros(len(x), leaf.out_features), 0
        for matrix, end in zip(leaf.weight, read(rows.ends), strict=True):
            y[begin:end] = tiled(x[begin:end], matrix)
            begin = end
        return y if leaf.bias is None else y + leaf.bias.index_select(0, rows.expert)


def tiled(x: Tensor, weight: Tensor) -> Tensor:
    """x (rows, inp) Wᵀ, tile by tile."""
    if not len(x):
        return x.new_zeros(0, weight.shape[0])
    filled = F.pad(x, (0, 0, 0, -len(x) % TILE))
    return torch.cat([F.linear(tile, weight) for tile in filled.split(TILE)])[: len(x)]


def make_invariant(model: nn.Module) -> int:
    """Let the plain linear leaves of a model multiply tile by tile; return how many."""
    leaves = [module for module in model.modules() if is_plain(module)]
    for leaf in leaves:
        leaf.storage = Tiled()
    return len(leaves)
