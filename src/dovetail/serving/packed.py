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

from dovetail.base.errors import SpecError
from dovetail.nn.ctx import Ctx
from dovetail.nn.linear import Linear, Rows, Storage, is_plain

NAME = "packed"  # of the buffer
ROWS = 16  # that the order is chosen for


class Packed(Storage):
    """A matrix for inference alone, packed in the buffer `packed`, which is opaque: the layout is oneDNN's."""

    def dense(self, leaf: Linear) -> Tensor:
        return leaf.get_buffer(NAME).to_dense()

    def dense_dtype(self, leaf: Linear) -> torch.dtype:
        return torch.float32

    def stored(self, leaf: Linear) -> dict[str, Tensor]:
        return {"weight": self.dense(leaf)}

    def multiply(self, leaf: Linear, x: Tensor, ctx: Ctx | None) -> Tensor:
        if x.dtype != torch.float32:
            bias = None if leaf.bias is None else leaf.bias.to(x.dtype)
            return nn.functional.linear(x, self.dense(leaf).to(x.dtype), bias)
        return torch.ops.mkldnn._linear_pointwise(x, leaf._buffers[NAME], leaf.bias, "none", [], "")

    def grouped(self, leaf: Linear, x: Tensor, rows: Rows, ctx: Ctx | None) -> Tensor:
        raise SpecError(
            leaf.path, "is packed, and a bank of experts is never", "this is a defect of dovetail; please report it"
        )

    def set_matrix(self, leaf: Linear, weight: Tensor) -> None:
        raise SpecError("weight", "is packed for inference, and cannot be replaced", "change the model before it is served")

    def describe(self, leaf: Linear) -> str:
        return f"{super().describe(leaf)}, packed"


@torch.no_grad()
def pack(model: nn.Module) -> int:
    """Pack the float32 matrices of a model on a CPU, in place; return how many leaves are packed. Leaves with one weight have
    one packed form."""
    made: dict[int, Tensor] = {}  # by the address of the weight
    paths = [path for path, leaf in model.named_modules() if _packs(leaf)]
    for path in paths:  # by path: a list of leaves would keep every matrix until the last is packed
        leaf = model.get_submodule(path)
        assert isinstance(leaf, Linear)
        address = leaf.weight.data_ptr()
        if address not in made:
            made[address] = torch.ops.mkldnn._reorder_linear_weight(leaf.weight.detach().contiguous(), ROWS)
        leaf.keep(Packed(), {NAME: made[address]}, persistent=False)
    return len(paths)


def _packs(leaf: nn.Module) -> bool:
    if not is_plain(leaf) or not torch.backends.mkldnn.is_available():
        return False
    return leaf.weight.dim() == 2 and leaf.weight.dtype == torch.float32 and leaf.weight.device.type == "cpu"
