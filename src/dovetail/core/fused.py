"""Joined leaves: linear leaves that read one input, multiplied at once in inference.

    W = [W_q; W_k; W_v]   one storage, of which the three weights are views        [q, k, v] = x Wᵀ, split

A part names such leaves in `together()`, and its module calls them by `core/linear.py:together`. `join(model)` makes the
storages. Nothing is to be undone before saving or training: each leaf keeps its own weight, and an update in place writes to
the storage. The storages are ordinary tensors, also where generation, in inference mode, makes them: weights that are
inference tensors could never be trained again.
"""

from __future__ import annotations

import torch
from torch import nn

from dovetail.core.linear import Joint, Linear, addresses
from dovetail.core.module import Module


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
