"""QuantizedStorage: the storage of a linear leaf whose W is stored in fewer bits.

    multiply(x) = x decode(tensors)ᵀ + b          the reference form: W is decoded, used, and dropped again
    x is format.inputs(x) where a format rounds activations, too; its gradient passes through the rounding as if there were none

Its tensors are buffers of the leaf with the names that the format declares (`q.weight_packed`, `q.weight_scale`), in place of
`q.weight`; they have no gradient. The gradient of x decodes W a second time, so that a training step of adapters holds no dense
W (QLoRA). A fast kernel takes the place of the product where it offers itself (`kernels.py`).

Shapes: W (out, inp), or (experts, out, inp) for `grouped`; x (…, inp).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.base.errors import SpecError
from dovetail.nn.ctx import Ctx
from dovetail.nn.linear import EXACT, Dense, Linear, Rows, Storage
from dovetail.ops.formats import kernels
from dovetail.ops.formats.format import CODES, Format


class QuantizedStorage(Storage):
    """A matrix in a format of fewer bits."""

    def __init__(self, shape: torch.Size, format: Format, dtype: torch.dtype) -> None:
        self.shape, self.format = tuple(shape), format
        self.dtype = dtype  # of the dense W, as that of the model's other weights
        self.exact = frozenset({"grouped"}) if format.rounds_inputs else EXACT
        self.operands: tuple[kernels.Kernel, kernels.Operands] | None = None  # of a fast kernel, made when it is first used

    def put(self, leaf: Linear, name: str, tensor: Tensor) -> None:
        """Set one of the tensors that the format declares."""
        declared = leaf.get_buffer(name)
        assert (tensor.shape, tensor.dtype) == (declared.shape, declared.dtype), f"{name}: {tensor.dtype} {tuple(tensor.shape)}"
        leaf.register_buffer(name, tensor)
        self.operands = None

    def stored(self, leaf: Linear) -> dict[str, Tensor]:
        return {name: leaf.get_buffer(name) for name in self.format.tensors(self.shape)}

    def dense_dtype(self, leaf: Linear) -> torch.dtype:
        return self.dtype

    def dense(self, leaf: Linear) -> Tensor:
        return self.format.decode(self.stored(leaf), leaf.in_features).to(self.dtype)

    def multiply(self, leaf: Linear, x: Tensor, ctx: Ctx | None) -> Tensor:
        y = self.product(leaf, x)
        return y if leaf.bias is None else y + leaf.bias.to(y.dtype)

    def product(self, leaf: Linear, x: Tensor) -> Tensor:
        """x Wᵀ, by a fast kernel if there is one."""
        return Product.apply(x, leaf, self) if torch.is_grad_enabled() and x.requires_grad else self.value(leaf, x)

    def value(self, leaf: Linear, x: Tensor) -> Tensor:
        """x Wᵀ without its gradient."""
        kernel = kernels.offered(self.format, self.shape, x)
        if kernel is None:
            return F.linear(self.format.inputs(x), self.dense(leaf).to(x.dtype))
        return kernels.product(kernel, self.format, self._operands(leaf, kernel), x, leaf.out_features)

    def _operands(self, leaf: Linear, kernel: kernels.Kernel) -> kernels.Operands:
        if self.operands is None or self.operands[0] is not kernel:
            self.operands = kernel, kernels.prepared(kernel, self.format, self.stored(leaf), leaf.in_features)
        return self.operands[1]

    def prepare(self, leaf: Linear) -> None:
        kernel = kernels.chosen(self.format, self.shape, self.dtype, self.stored(leaf)[CODES].device)
        if kernel is not None:
            self._operands(leaf, kernel)

    def grouped(self, leaf: Linear, x: Tensor, rows: Rows, ctx: Ctx | None) -> Tensor:
        if self.format.rounds_inputs:
            x = x + (self.format.inputs(x) - x).detach()
        y = rows.multiply(x, self.dense(leaf).to(x.dtype))
        return y if leaf.bias is None else y + leaf.bias.index_select(0, rows.expert)

    def renew(self, leaf: Linear) -> None:
        self.operands = None  # they are of the tensors that were written over

    def set_matrix(self, leaf: Linear, weight: Tensor) -> None:
        raise SpecError(
            "adapter", "cannot be merged into weights of fewer bits", "merge it into the dense base, and quantize the result"
        )

    def describe(self, leaf: Linear) -> str:
        """Its sizes and its format."""
        return f"{' × '.join(map(str, self.shape))}{', bias' * (leaf.bias is not None)}, {self.format}"

    def moved(self, leaf: Linear, fn: Callable[[Tensor], Tensor], before: dict[str, Tensor]) -> None:
        """Leave the dtypes of the tensors as they were: a cast of the model is one of the dense W."""
        super().moved(leaf, fn, before)
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        for name, new in self.stored(leaf).items():
            if new.dtype != before[name].dtype:
                leaf.register_buffer(name, before[name].to(new.device))


def store_quantized(leaf: Linear, format: Format, tensors: dict[str, Tensor] | None = None) -> QuantizedLeaf:
    """Store the W of a dense leaf in a format, by the tensors that stand for it; None: on the meta device."""
    storage = QuantizedStorage(leaf.weight.shape, format, leaf.weight.dtype)
    leaf.keep(storage, format.tensors(storage.shape))
    for name, tensor in (tensors or {}).items():
        storage.put(leaf, name, tensor)
    return QuantizedLeaf(leaf, storage)


class QuantizedLeaf(NamedTuple):
    """A linear leaf and its storage of fewer bits."""

    leaf: Linear
    storage: QuantizedStorage

    @property
    def format(self) -> Format:
        """The format of its codes."""
        return self.storage.format

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of W."""
        return self.storage.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the dense W."""
        return self.storage.dtype

    def stored(self) -> dict[str, Tensor]:
        """The tensors that stand for W."""
        return self.storage.stored(self.leaf)

    def dense(self) -> Tensor:
        """W, decoded anew."""
        return self.storage.dense(self.leaf)


SAVED = (Dense, QuantizedStorage)  # the storages whose tensors a model directory holds


class Product(torch.autograd.Function):
    """x Wᵀ, which keeps the leaf for the backward pass, and no dense W."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, leaf: Linear, storage: QuantizedStorage) -> Tensor:
        ctx.leaf, ctx.storage = leaf, storage
        return storage.value(leaf, x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return g @ ctx.storage.dense(ctx.leaf).to(g.dtype), None, None
