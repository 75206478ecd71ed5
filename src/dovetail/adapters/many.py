"""Several LoRA adapters on one model, in one batch: each row is computed with its own.

    y_i = x_i Wᵀ + s · (x_i A_jᵀ) B_jᵀ,   j = index[i]            A (adapters, rank, inp), B (adapters, out, rank)

    chosen = attach_many(model, Lora(rank=16), [tensors_0, tensors_1, …])
    with chosen.rows([0, 2, 1]):                    row 0 has adapter 0, row 1 adapter 2, row 2 adapter 1
        model(ids)

The rows share the product with W; each has its own two small ones. The index counts the first dimension of what a leaf is
given: the rows of a batch, or the tokens of a flat batch. A leaf that is given something else refuses.
Shapes: x (rows, n, inp) or (tokens, inp), index (rows,).                                     Chen et al. 2023 (Punica)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from dovetail.adapters.attach import attach
from dovetail.adapters.lora import Lora, LoraModule
from dovetail.core.errors import InputError, SpecError
from dovetail.core.held import adapted_leaves
from dovetail.core.linear import Adapter, Linear, Offer, Rows
from dovetail.model import ModelModule


class Chosen:
    """Which adapter each row has; all leaves of a model refer to this object."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.index: Tensor | None = None

    @contextmanager
    def rows(self, index: Sequence[int] | Tensor) -> Iterator[None]:
        """Within this context row i of a batch, or token i of a flat batch, has adapter index[i]; −1: none."""
        index = torch.as_tensor(index, dtype=torch.int64)
        if index.dim() != 1 or not bool(((index >= -1) & (index < self.count)).all()):
            raise InputError(f"index: must be one number per row, from -1 (none) to {self.count - 1}")
        before, self.index = self.index, index
        try:
            yield
        finally:
            self.index = before

    def of(self, rows: int, path: str) -> Tensor:
        """(rows,) the adapter of each row; those without one have the last, which is zero."""
        if self.index is None:
            raise InputError(f"{path}: which adapter has each row? run the model inside `with chosen.rows(index)`")
        if len(self.index) != rows:
            raise InputError(f"{path}: is given {rows} rows, and the index has {len(self.index)}; give one number per row")
        return torch.where(self.index < 0, self.count, self.index)


class ManyModule(Adapter):
    """a (adapters + 1, …, rank, inp), b (adapters + 1, …, out, rank), the last zero."""

    exact: frozenset[Offer] = frozenset({"grouped"})

    def __init__(self, of: Sequence[Mapping[str, Tensor]], factor: float, chosen: Chosen, path: str) -> None:
        super().__init__()
        self.chosen, self.path = chosen, path
        a, b = (torch.stack([*(one[name] for one in of), torch.zeros_like(of[0][name])]) for name in ("a", "b"))
        self.register_buffer("a", a * factor, persistent=False)
        self.register_buffer("b", b, persistent=False)
        self.a: Tensor
        self.b: Tensor

    def forward(self, leaf: Linear, x: Tensor) -> Tensor:
        y, index = leaf.multiply(x), self.chosen.of(x.shape[0], self.path)
        rows = x.unsqueeze(1) if x.dim() == 2 else x
        a, b = (one.index_select(0, index).to(x.dtype) for one in (self.a, self.b))
        small = torch.bmm(rows.flatten(1, -2), a.transpose(1, 2))
        return torch.baddbmm(y.reshape(len(y), -1, y.shape[-1]), small, b.transpose(1, 2)).view(y.shape)

    def grouped(self, leaf: Linear, x: Tensor, rows: Rows) -> Tensor:
        """Each row by its adapter's factors for its expert: adapter by adapter, the rows of others as zeros."""
        y = leaf.multiply_grouped(x, rows)
        index = self._of_choices(rows)
        for i in range(self.chosen.count):
            own = torch.where((index == i)[:, None], x, 0.0)
            y = y + rows.multiply(rows.multiply(own, self.a[i].to(x.dtype)), self.b[i].to(x.dtype))
        return y

    def _of_choices(self, rows: Rows) -> Tensor:
        """(rows,) the adapter of each row of a bank of experts: that of its token."""
        index = self.chosen.index
        if index is None:
            raise InputError(f"{self.path}: which adapter has each row? run the model inside `with chosen.rows(index)`")
        per_row = len(rows.choice) // len(index)  # tokens of a row, times choices of a token
        return index.index_select(0, rows.choice // per_row)

    def matrix(self, leaf: Linear) -> Tensor:
        raise InputError(f"{self.path}: rows have different adapters, so there is no one matrix")


def attach_many(model: ModelModule, kind: Lora, several: Sequence[Mapping[str, Tensor]]) -> Chosen:
    """Attach several LoRA adapters of one rank and one set of targets to a model, each given by its tensors (path -> tensor).
    They are for inference: nothing of them is trained or saved."""
    if type(kind).adapter(kind) is not LoraModule:
        raise SpecError("adapter", f"{kind.kind}: rows can have different adapters with lora alone")
    attach(model, kind)
    chosen = Chosen(len(several))
    made: dict[int, ManyModule] = {}
    for path, leaf in list(adapted_leaves(model)):
        adapter = leaf.adapter
        assert isinstance(adapter, LoraModule)
        if id(adapter) not in made:
            of = [{d.weight.name: tensors[d.path] for d in adapter.declared} for tensors in several]
            made[id(adapter)] = ManyModule(of, kind.factor, chosen, path)
        leaf.adapter = made[id(adapter)]
    return chosen
