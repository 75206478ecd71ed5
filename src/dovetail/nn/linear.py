"""Linear: the leaf of every matrix that tokens are multiplied by. Storage and adapter change it, and nothing else.

    linear(x, ctx)                x Wᵀ + b, in the dtype of x
    linear.grouped(x, rows, ctx)  each row by its own matrix, x_r W_{e(r)}ᵀ + b_{e(r)}: a bank of experts
    linear.matrix(ctx)            W itself, where a part multiplies by it in another order (absorbed MLA)

A part calls these and never reads `.weight`, so that a leaf that is stored in another form, or adapted, is used on every path
of the part. How W is stored and what is added to it are two objects that the leaf holds, so that any adapter fits any storage
(QLoRA). Both are called with the leaf and the ctx:

    leaf.storage    a Storage: which tensors stand for W, and how x is multiplied by them; dense, unless it is replaced
    leaf.adapter    an Adapter, a child module that changes what the leaf computes; None for a leaf without one

The tensors of a storage are parameters and buffers of the leaf, under the leaf's path: a storage has no path of its own.

Both declare in `exact` which of the last two equal what `linear(x, ctx)` computes: a LoRA with dropout has no matrix. Where a
part can do without, it asks `offers`; a path that cannot must refuse. A module of another library in the place of a leaf is
called as `module(x, ctx)`.

Shapes: W (out, inp), or (experts, out, inp) for `grouped`; x (…, inp) or (rows, inp).
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, Self, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from dovetail.nn.ctx import Ctx
    from dovetail.spec.fold import Declared

Offer = Literal["grouped", "matrix"]
EXACT: frozenset[Offer] = frozenset({"grouped", "matrix"})


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


class Storage(ABC):
    """How a leaf stores W, and multiplies by it."""

    exact: frozenset[Offer] = EXACT

    @abstractmethod
    def multiply(self, leaf: Linear, x: Tensor, ctx: Ctx | None) -> Tensor:
        """x Wᵀ + b."""

    @abstractmethod
    def grouped(self, leaf: Linear, x: Tensor, rows: Rows, ctx: Ctx | None) -> Tensor:
        """Each row by the matrix of its expert, and its bias."""

    @abstractmethod
    def dense(self, leaf: Linear) -> Tensor:
        """W as a dense tensor."""

    @abstractmethod
    def dense_dtype(self, leaf: Linear) -> torch.dtype:
        """The dtype of the dense W."""

    @abstractmethod
    def stored(self, leaf: Linear) -> dict[str, Tensor]:
        """The tensors that a file holds for W, by name."""

    @abstractmethod
    def set_matrix(self, leaf: Linear, weight: Tensor) -> None:
        """Replace W, in place: tied leaves and fused leaves see the new values."""

    def prepare(self, leaf: Linear) -> None:  # noqa: B027  most storages make nothing
        """Make what `multiply` computes once from W, before it is compiled: a graph would compute it in every call."""

    def renew(self, leaf: Linear) -> None:  # noqa: B027
        """Drop what was made from W, which now has other values."""

    def moved(self, leaf: Linear, fn: Callable[[Tensor], Tensor], before: dict[str, Tensor]) -> None:
        """Accept that `fn` has moved or cast the tensors of the leaf; `before` are its buffers before that."""
        self.renew(leaf)

    def describe(self, leaf: Linear) -> str:
        """The sizes of W, and its form."""
        return f"{leaf.out_features} × {leaf.in_features}{', bias' * (leaf.bias is not None)}"


class Dense(Storage):
    """W is the parameter `weight`."""

    def multiply(self, leaf: Linear, x: Tensor, ctx: Ctx | None) -> Tensor:
        weight, bias, dtype = leaf.weight, leaf.bias, x.dtype
        if weight.dtype == dtype:
            return F.linear(x, weight, bias)
        return F.linear(x, weight.to(dtype), None if bias is None else bias.to(dtype))  # a router in float32

    def grouped(self, leaf: Linear, x: Tensor, rows: Rows, ctx: Ctx | None) -> Tensor:
        y = rows.multiply(x, leaf.weight)
        return y if leaf.bias is None else y + leaf.bias.index_select(0, rows.expert)

    def dense(self, leaf: Linear) -> Tensor:
        return leaf.weight

    def dense_dtype(self, leaf: Linear) -> torch.dtype:
        return leaf.weight.dtype

    def stored(self, leaf: Linear) -> dict[str, Tensor]:
        return {"weight": leaf.weight}

    def set_matrix(self, leaf: Linear, weight: Tensor) -> None:
        leaf.weight.copy_(weight)

    def describe(self, leaf: Linear) -> str:
        return f"{' × '.join(map(str, leaf.weight.shape))}{', bias' * (leaf.bias is not None)}"


class Adapter(nn.Module, ABC):
    """A change of what a leaf computes, with parameters of its own; the leaf keeps its W and bias, and their names."""

    exact: frozenset[Offer] = frozenset()
    declared: tuple[Declared, ...] = ()  # its parameters, with their paths in the model (nn/declared_tensors.py)
    freezes: bool = True  # whether the base stays as it is while the adapter is trained
    removed_by: str = "merge it or detach it first"  # the remedy of whoever finds it in the way

    @abstractmethod
    def forward(self, leaf: Linear, x: Tensor, ctx: Ctx | None) -> Tensor:
        """(…, inp) -> (…, out), in place of `leaf.storage.multiply(leaf, x, ctx)`."""

    @abstractmethod
    def grouped(self, leaf: Linear, x: Tensor, rows: Rows, ctx: Ctx | None) -> Tensor:
        """(rows, inp) -> (rows, out), in place of `leaf.storage.grouped(leaf, x, rows, ctx)`."""

    @abstractmethod
    def matrix(self, leaf: Linear, ctx: Ctx | None = None) -> Tensor:
        """The matrix that the adapted leaf multiplies by, in place of the stored one."""

    def exact_in(self, ctx: Ctx | None) -> frozenset[Offer]:
        """What is exact in a pass."""
        return self.exact

    def merged_bias(self, leaf: Linear) -> Tensor | None:
        """The bias that belongs to `matrix`, in place of the leaf's."""
        return leaf.bias

    def match(self, leaf: Linear) -> None:
        """Set the parameters whose initial value follows from W; called once W has its value."""


class Linear(nn.Linear):
    """A matrix and perhaps a bias, on the meta device until the model is built. Tools that look for torch's class find it."""

    storage: Storage = Dense()
    adapter: Adapter | None

    def __init__(self, shape: Sequence[int], bias: bool = False, path: str = "") -> None:
        nn.Module.__init__(self)  # not that of torch's class, which has one matrix
        self.adapter, self.path = None, path
        *_, self.out_features, self.in_features = shape
        self.weight = nn.Parameter(torch.empty(*shape, device="meta"))
        self.register_parameter("bias", nn.Parameter(torch.empty(*shape[:-1], device="meta")) if bias else None)

    def forward(self, input: Tensor, ctx: Ctx | None = None) -> Tensor:
        """(…, inp) -> (…, out); `ctx` is that of the pass, None for a leaf that is called by itself."""
        return self.storage.multiply(self, input, ctx) if self.adapter is None else self.adapter(self, input, ctx)

    def grouped(self, x: Tensor, rows: Rows, ctx: Ctx | None = None) -> Tensor:
        """x (rows, inp) -> (rows, out), each row by the matrix of its expert."""
        return self.storage.grouped(self, x, rows, ctx) if self.adapter is None else self.adapter.grouped(self, x, rows, ctx)

    def matrix(self, ctx: Ctx | None = None) -> Tensor:
        """(out, inp), or (experts, out, inp)."""
        return self.dense() if self.adapter is None else self.adapter.matrix(self, ctx)

    def dense(self) -> Tensor:
        """W as a dense tensor, without the adapter."""
        return self.storage.dense(self)

    @torch.no_grad()
    def set_matrix(self, weight: Tensor, bias: Tensor | None) -> None:
        """Replace W and the bias, in place."""
        self.storage.set_matrix(self, weight)
        if self.bias is not None and bias is not None:
            self.bias.copy_(bias)

    def keep(self, storage: Storage, tensors: dict[str, Tensor], persistent: bool = True) -> None:
        """Take a storage and its tensors, which become buffers, in place of the parameter `weight`."""
        del self.weight
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor, persistent)
        self.storage = storage

    def twin(self, path: str) -> Linear:
        """A leaf at another path with the same tensors, storage and adapter: what changes in one changes in both."""
        leaf = copy.copy(self)  # a module's copy has the same dicts of parameters, buffers and children
        leaf.path = path
        return leaf

    def extra_repr(self) -> str:
        """Its sizes."""
        return self.storage.describe(self)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.storage.renew(self)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)
        self.storage.moved(self, fn, before)
        return self


class FusedWeight(NamedTuple):
    """The weights of a few leaves in one tensor (`nn/fused.py`)."""

    weight: Tensor  # (Σ out, inp)
    bias: Tensor | None  # (Σ out,)
    sizes: tuple[int, ...]
    addresses: tuple[int, ...]  # of the weights and biases of the leaves, as views of this tensor


def multiply_fused(x: Tensor, ctx: Ctx, fused: FusedWeight | None, *leaves: Linear) -> Sequence[Tensor]:
    """The outputs of leaves that read one input. They are multiplied at once where they are fused and nothing tells the two
    apart: no gradient is recorded, each leaf is plain and without hooks, and its weight still is that view."""
    if fused is not None and not torch.is_grad_enabled() and all(map(_bare, leaves)):
        # a compiled graph has no addresses; it is guarded by the fused weight itself
        if torch.compiler.is_compiling() or fused.addresses == addresses(leaves):
            return F.linear(x, fused.weight, fused.bias).split(fused.sizes, -1)
    outputs: list[Tensor] = []  # a comprehension would be one more call
    for leaf in leaves:
        outputs.append(leaf(x, ctx))
    return outputs


def is_plain(leaf: nn.Module) -> TypeGuard[Linear]:
    """Whether it is a leaf of ours that stores a dense W; it may have an adapter."""
    return type(leaf) is Linear and type(leaf.storage) is Dense


def _bare(leaf: nn.Module) -> bool:
    plain = type(leaf) is Linear and type(leaf.storage) is Dense and leaf.adapter is None  # `is_plain` would be one more call
    return plain and not leaf._forward_hooks and not leaf._forward_pre_hooks


def addresses(leaves: Sequence[Linear]) -> tuple[int, ...]:
    """The addresses of all weights and biases."""
    return tuple(x.data_ptr() for leaf in leaves for x in (leaf.weight, leaf.bias) if x is not None)


def offers(what: Offer, ctx: Ctx | None, *leaves: nn.Module) -> bool:
    """Whether all leaves have an exact `grouped` or `matrix` in a pass; a leaf of another library has neither."""
    return all(
        isinstance(leaf, Linear) and what in leaf.storage.exact and (leaf.adapter is None or what in leaf.adapter.exact_in(ctx))
        for leaf in leaves
    )


def dtype_of(leaf: nn.Module) -> torch.dtype:
    """The dtype of the dense W of a leaf, also of one of another library."""
    return leaf.storage.dense_dtype(leaf) if isinstance(leaf, Linear) else next(leaf.parameters()).dtype
