"""Packed leaves: float32 matrices of a model that is served on a CPU, in the order in which oneDNN's kernel reads them.

    y = x Wᵀ + b          W (out, inp) in blocks, packed once when the engine starts

For 4 to 64 rows, what a server multiplies at once, the kernel takes 0.4 to 0.8 of the time of torch's product with the matrix
as files store it (55 M parameters, two threads: 16 ms and 40 ms for 16 rows), and a row has the same bits beside any others.
For one and two rows it takes 1.2 times as long; in bfloat16 the two are equal, so that float32 alone is packed. The packed form
replaces the matrix; only one that is tied to the embedding is in memory twice.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dovetail.core.errors import SpecError
from dovetail.core.linear import Linear
from dovetail.core.module import holder

ROWS = 16  # that the order is chosen for


class PackedLinear(Linear):
    """A leaf for inference alone, whose matrix is packed."""

    packed: Tensor  # opaque: the layout is oneDNN's

    def __init__(self, of: Linear, packed: Tensor) -> None:
        nn.Module.__init__(self)
        self.adapter = of.adapter
        self.register_buffer("packed", packed, persistent=False)
        self.in_features, self.out_features = of.in_features, of.out_features
        self.register_parameter("bias", of.bias)
        self.train(of.training)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """W, unpacked anew."""
        return self.dense()

    def dense(self) -> Tensor:
        return self.packed.to_dense()

    def dense_dtype(self) -> torch.dtype:
        return torch.float32

    def multiply(self, input: Tensor) -> Tensor:
        if input.dtype != torch.float32:
            bias = None if self.bias is None else self.bias.to(input.dtype)
            return nn.functional.linear(input, self.dense().to(input.dtype), bias)
        return torch.ops.mkldnn._linear_pointwise(input, self.packed, self.bias, "none", [], "")

    def set_matrix(self, weight: Tensor, bias: Tensor | None) -> None:
        raise SpecError("weight", "is packed for inference, and cannot be replaced", "change the model before it is served")

    def extra_repr(self) -> str:
        """Its sizes."""
        return f"{self.out_features} × {self.in_features}{', bias' * (self.bias is not None)}, packed"


@torch.no_grad()
def pack(model: nn.Module) -> int:
    """Pack the float32 matrices of a model on a CPU, in place; return how many leaves are packed. Leaves with one weight have
    one packed form."""
    made: dict[int, Tensor] = {}  # by the address of the weight
    paths = [path for path, leaf in model.named_modules(remove_duplicate=False) if _packs(leaf)]
    for path in paths:  # by path: a list of leaves would keep every matrix until the last is packed
        owner, name = holder(model, path)
        leaf = owner.get_submodule(name)
        assert isinstance(leaf, Linear)
        address = leaf.weight.data_ptr()
        if address not in made:
            made[address] = torch.ops.mkldnn._reorder_linear_weight(leaf.weight.detach().contiguous(), ROWS)
        owner.add_module(name, PackedLinear(leaf, made[address]))
    return len(paths)


def _packs(leaf: nn.Module) -> bool:
    if type(leaf) is not Linear or not torch.backends.mkldnn.is_available():
        return False
    return leaf.weight.dim() == 2 and leaf.weight.dtype == torch.float32 and leaf.weight.device.type == "cpu"
