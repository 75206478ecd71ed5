"""Linear: the leaf of every matrix that tokens are multiplied by. Adapters and quantization change it, and nothing else.

    linear(x)                x Wᵀ + b, in the dtype of x
    linear.grouped(x, rows)  each row by its own matrix, x_r W_{e(r)}ᵀ + b_{e(r)}: a bank of experts
    linear.matrix()          W itself, where a part multiplies by it in another order (absorbed MLA)

A part calls these and never reads `.weight`, so that a leaf of another class, or an adapted one, is used on every path of the
part. How W is stored and what is added to it are apart, so that any adapter fits any storage (QLoRA):

    a subclass of Linear stores W in another form   `multiply`, `multiply_grouped`, `dense`, `stored`
    an Adapter changes what the leaf computes       `leaf.adapter`, a child module; None for a leaf without one

Both declare in `exact` which of the last two equal what `linear(x)` computes: a LoRA with dropout has no matrix. Where a part
can do without, it asks `offers`; a path that cannot must refuse.

Shapes: W (out, inp), or (experts, out, inp) for `grouped`; x (…, inp) or (rows, inp).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from dovetail.core.fold import Declared

Offer = Literal["grouped", "matrix"]


class Rows(Protocol):
    """Rows sorted by expert."""

    @property
    def choice(self) -> Tensor:
        """(rows,) the number of each row before they were sorted: its token times the choices per token, plus which."""
        ...

    @property
    def expert(self) -> Tensor:
        """(rows,) the matrix of each row."""
        ...

    @property
    def ends(self) -> Tensor:
        """(experts,) where the rows of each matrix end."""
        ...

    def multiply(self, x: Tensor, matrices: Tensor) -> Tensor:
        """x (rows, inp), matrices (experts, out, inp) -> (rows, out)."""
        ...


class Adapter(nn.Module, ABC):
    """A change of what a leaf computes, with parameters of its own; the leaf keeps its W and bias, and their names."""

    exact: frozenset[Offer] = frozenset()
    declared: tuple[Declared, ...] = ()  # its parameters, with their paths in the model (core/declared_tensors.py)
    freezes: bool = True  # whether the base stays as it is while the adapter is trained
    removed_by: str = "merge it or detach it first"  # the remedy of whoever finds it in the way

    @abstractmethod
    def forward(self, leaf: Linear, x: Tensor) -> Tensor:
        """(…, inp) -> (…, out), in place of `leaf.multiply(x)`."""

    @abstractmethod
    def grouped(self, leaf: Linear, x: Tensor, rows: Rows) -> Tensor:
        """(rows, inp) -> (rows, out), in place of `leaf.multiply_grouped(x, rows)`."""

    @abstractmethod
    def matrix(self, leaf: Linear) -> Tensor:
        """The matrix that the adapted leaf multiplies by, in place of `leaf.dense()`."""

    def merged_bias(self, leaf: Linear) -> Tensor | None:
        """The bias that belongs to `matrix`, in place of the leaf's."""
        return leaf.bias

    def match(self, leaf: Linear) -> None:
        """Set the parameters whose initial value follows from W; called once W has its value."""


class Linear(nn.Linear):
    """A dense matrix and perhaps a bias, on the meta device until the model is built. Tools that look for torch's class find
    it; what they put in its place works wherever a part calls `linear(x)`."""

    exact: frozenset[Offer] = frozenset({"grouped", "matrix"})
    adapter: Adapter | None

    def __init__(self, shape: Sequence[int], bias: bool = False) -> None:
        nn.Module.__init__(self)  # not that of torch's class, which has one matrix
        self.adapter = None
        *_, self.out_features, self.in_features = shape
        self.weight = nn.Parameter(torch.empty(*shape, device="meta"))
        self.register_parameter("bias", nn.Parameter(torch.empty(*shape[:-1], device="meta")) if bias else None)

    def forward(self, input: Tensor) -> Tensor:
        """(…, inp) -> (…, out)."""
        return self.multiply(input) if self.adapter is None else self.adapter(self, input)

    def grouped(self, x: Tensor, rows: Rows) -> Tensor:
        """x (rows, inp) -> (rows, out), each row by the matrix of its expert."""
        return self.multiply_grouped(x, rows) if self.adapter is None else self.adapter.grouped(self, x, rows)

    def matrix(self) -> Tensor:
        """(out, inp), or (experts, out, inp)."""
        return self.dense() if self.adapter is None else self.adapter.matrix(self)

    def multiply(self, input: Tensor) -> Tensor:
        """x Wᵀ + b without an adapter."""
        weight, bias, dtype = self.weight, self.bias, input.dtype
        if weight.dtype == dtype:
            return F.linear(input, weight, bias)
        return F.linear(input, weight.to(dtype), None if bias is None else bias.to(dtype))  # a router in float32

    def multiply_grouped(self, x: Tensor, rows: Rows) -> Tensor:
        """Each row by the matrix of its expert, without an adapter."""
        y = rows.multiply(x, self.weight)
        return y if self.bias is None else y + self.bias.index_select(0, rows.expert)

    def dense(self) -> Tensor:
        """W as a dense tensor, without an adapter."""
        return self.weight

    def dense_dtype(self) -> torch.dtype:
        """The dtype of the dense W."""
        return self.weight.dtype

    def prepare(self) -> None:
        """Make what `multiply` computes once from W, before it is compiled: a graph would compute it in every call."""

    def stored(self) -> dict[str, Tensor]:
        """The tensors that a file holds for W, by name."""
        return {"weight": self.weight}

    @torch.no_grad()
    def set_matrix(self, weight: Tensor, bias: Tensor | None) -> None:
        """Replace W and the bias, in place: tied leaves and joined leaves see the new values."""
        self.weight.copy_(weight)
        if self.bias is not None and bias is not None:
            self.bias.copy_(bias)

    def extra_repr(self) -> str:
        """Its sizes."""
        return f"{' × '.join(map(str, self.weight.shape))}{', bias' * (self.bias is not None)}"


class Joint(NamedTuple):
    """The weights of a few leaves in one storage (`core/fused.py`)."""

    weight: Tensor  # (Σ out, inp)
    bias: Tensor | None  # (Σ out,)
    sizes: tuple[int, ...]
    addresses: tuple[int, ...]  # of the weights and biases of the leaves, as views of this storage


def together(x: Tensor, joint: Joint | None, *leaves: Linear) -> Sequence[Tensor]:
    """The outputs of leaves that read one input. They are multiplied at once where they are joined and nothing tells the two
    apart: no gradient is recorded, each leaf is plain and without hooks, and its weight still is that view."""
    if joint is not None and not torch.is_grad_enabled() and all(map(_bare, leaves)):
        # a compiled graph has no addresses; it is guarded by the joint itself
        if torch.compiler.is_compiling() or joint.addresses == addresses(leaves):
            return F.linear(x, joint.weight, joint.bias).split(joint.sizes, -1)
    outputs: list[Tensor] = []  # a comprehension would be one more call
    for leaf in leaves:
        outputs.append(leaf(x))
    return outputs


def _bare(leaf: nn.Module) -> bool:
    return type(leaf) is Linear and leaf.adapter is None and not leaf._forward_hooks and not leaf._forward_pre_hooks


def addresses(leaves: Sequence[Linear]) -> tuple[int, ...]:
    """The addresses of all weights and biases."""
    return tuple(x.data_ptr() for leaf in leaves for x in (leaf.weight, leaf.bias) if x is not None)


def offers(what: Offer, *leaves: nn.Module) -> bool:
    """Whether all leaves have an exact `grouped` or `matrix`; a leaf of another library has neither."""
    return all(
        isinstance(leaf, Linear) and what in leaf.exact and (leaf.adapter is None or what in leaf.adapter.exact)
        for leaf in leaves
    )


def dtype_of(leaf: nn.Module) -> torch.dtype:
    """The dtype of the dense W of a leaf, also of one of another library."""
    return leaf.dense_dtype() if isinstance(leaf, Linear) else next(leaf.parameters()).dtype
