"""QuantizedLinear: a linear leaf whose W is stored in fewer bits.

    multiply(x) = x decode(tensors)ᵀ + b          the reference form: W is decoded, used, and dropped again
    x is format.inputs(x) where a format rounds activations, too; its gradient passes through the rounding as if there were none

Its tensors are buffers with the names that the format declares (`q.weight_packed`, `q.weight_scale`), in place of `q.weight`;
they have no gradient. The gradient of x decodes W a second time, so that a training step of adapters holds no dense W (QLoRA).
A fast kernel takes the place of the product where it offers itself (`kernels.py`).

Shapes: W (out, inp), or (experts, out, inp) for `grouped`; x (…, inp).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dovetail.core.errors import SpecError
from dovetail.core.linear import Linear, Rows
from dovetail.ops.formats import kernels
from dovetail.ops.formats.format import CODES, Format


class QuantizedLinear(Linear):
    """A matrix in a format of fewer bits, and perhaps a bias, on the meta device until its tensors are set."""

    dtype: torch.dtype  # of the dense W, as that of the model's other weights
    operands: tuple[Tensor, Tensor] | None  # of the fast kernel, made when it is first used

    def __init__(self, shape: Sequence[int], format: Format, bias: nn.Parameter | None, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.adapter = None
        self.shape, self.format, self.dtype = tuple(shape), format, dtype
        self.operands = None
        self.exact = frozenset({"grouped"}) if format.rounds_inputs else Linear.exact
        *_, self.out_features, self.in_features = shape
        for name, tensor in format.tensors(shape).items():
            self.register_buffer(name, tensor)
        self.register_parameter("bias", bias)

    @classmethod
    def of(cls, leaf: Linear, format: Format, tensors: dict[str, Tensor] | None = None) -> QuantizedLinear:
        """A leaf like another, with the tensors that stand for its W; None: on the meta device."""
        made = cls(leaf.weight.shape, format, leaf.bias, leaf.weight.dtype)
        made.adapter = leaf.adapter
        for name, tensor in (tensors or {}).items():
            made.put(name, tensor)
        return made.train(leaf.training)

    def put(self, name: str, tensor: Tensor) -> None:
        """Set one of the tensors that the format declares."""
        declared = self.get_buffer(name)
        assert (tensor.shape, tensor.dtype) == (declared.shape, declared.dtype), f"{name}: {tensor.dtype} {tuple(tensor.shape)}"
        self.register_buffer(name, tensor)
        self.operands = None

    def stored(self) -> dict[str, Tensor]:
        return {name: self.get_buffer(name) for name in self.format.tensors(self.shape)}

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The dense W, decoded anew."""
        return self.dense()

    def dense_dtype(self) -> torch.dtype:
        return self.dtype

    def dense(self) -> Tensor:
        return self.format.decode(self.stored(), self.in_features).to(self.dtype)

    def multiply(self, input: Tensor) -> Tensor:
        y = self.product(input)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def product(self, x: Tensor) -> Tensor:
        """x Wᵀ, by a fast kernel where one offers itself."""
        if not kernels.offers(self.format, self.shape, x):
            return Product.apply(x, self)  # type: ignore[no-any-return]
        if self.operands is None:
            self.operands = kernels.prepared(self.format, self.stored(), self.in_features)
        return kernels.product(self.format, self.operands, x, self.out_features)

    def prepare(self) -> None:
        tensors = self.stored()
        if self.operands is None and kernels.takes(self.format, self.shape, self.dtype, tensors[CODES].device):
            self.operands = kernels.prepared(self.format, tensors, self.in_features)

    def multiply_grouped(self, x: Tensor, rows: Rows) -> Tensor:
        if self.format.rounds_inputs:
            x = x + (self.format.inputs(x) - x).detach()
        y = rows.multiply(x, self.dense().to(x.dtype))
        return y if self.bias is None else y + self.bias.index_select(0, rows.expert)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.operands = None  # they are of the tensors that are written over
        super()._load_from_state_dict(*args, **kwargs)

    def set_matrix(self, weight: Tensor, bias: Tensor | None) -> None:
        raise SpecError(
            "adapter", "cannot be merged into weights of fewer bits", "merge it into the dense base, and quantize the result"
        )

    def extra_repr(self) -> str:
        """Its sizes and its format."""
        return f"{' × '.join(map(str, self.shape))}{', bias' * (self.bias is not None)}, {self.format}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the tensors, but leave their dtypes: a cast of the model is one of the dense W."""
        kept = {name: tensor.dtype for name, tensor in self.stored().items()}
        before = self.stored()
        super()._apply(fn, recurse)
        self.operands = None
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        for name, dtype in kept.items():
            new = self.get_buffer(name)
            if new.dtype != dtype:
                self.register_buffer(name, before[name].to(new.device))
        return self


SAVED = (Linear, QuantizedLinear)  # the classes of leaf whose tensors a model directory holds


class Product(torch.autograd.Function):
    """x Wᵀ, which keeps the leaf for the backward pass, and no dense W."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, leaf: QuantizedLinear) -> Tensor:
        ctx.leaf = leaf
        return F.linear(leaf.format.inputs(x), leaf.dense().to(x.dtype))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return g @ ctx.leaf.dense().to(g.dtype), None
