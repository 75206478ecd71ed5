"""Several LoRA adapters on one model by name, in one batch: each row is computed with its own.

    y_i = x_i Wᵀ + (x_i A_jᵀ) (s_j B_j)ᵀ,   j = index[i]          A (adapters + 1, rank, inp), B (adapters + 1, out, rank)

    bank = Bank(model)
    bank.load("french", Lora(rank=16), tensors)     ranks, factors and targets may differ from adapter to adapter
    with bank.rows(["french", None, "legal"]):      row 0 has one, row 1 none, row 2 another
        model(ids)
    bank.unload("french")

The rows share the product with W; each has its own two small ones. A lower rank is padded with zeros, and a row without an
adapter has the last one, which is zero: adding it changes no bit. The index counts the first dimension of what a leaf is
given: the rows of a batch, or the tokens of a flat batch. A leaf that is given something else refuses.
A leaf has one adapter: while a bank of a model has adapters, another bank of it and `attach` refuse.
Shapes: x (rows, n, inp) or (tokens, inp), index (rows,).                                     Chen et al. 2023 (Punica)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dovetail.base.errors import FileError, InputError, SpecError, names_or_nearest
from dovetail.model.model import ModelModule
from dovetail.nn.ctx import Ctx
from dovetail.nn.finite import nonfinite
from dovetail.nn.linear import Adapter, Linear, Offer, Rows
from dovetail.spec.fold import declared
from dovetail.weights.adapters.attach import check_bare, targeted
from dovetail.weights.adapters.kind import AdapterKind, leaf_path
from dovetail.weights.adapters.lora import Lora, LoraModule
from dovetail.weights.adapters.storage import check_tensors


class Chosen:
    """Which adapter each row has, by number; all leaves of a model refer to this object."""

    def __init__(self) -> None:
        self.index: Tensor | None = None

    def of(self, rows: int, path: str) -> Tensor:
        """(rows,) the adapter of each row."""
        index = self.given(path)
        if len(index) != rows:
            raise InputError(f"{path}: is given {rows} rows, and the index has {len(index)}; give one name per row")
        return index

    def given(self, path: str) -> Tensor:
        """The index; InputError where none is set."""
        if self.index is None:
            raise InputError(f"{path}: which adapter has each row? run the model inside `with bank.rows(names)`")
        return self.index


class Factors(NamedTuple):
    """One adapter of one leaf: a (…, rank, inp), b (…, out, rank) with the factor s."""

    a: Tensor
    b: Tensor


class Bank:
    """The adapters of a model, by name, for inference."""

    def __init__(self, model: ModelModule) -> None:
        self.model, self.chosen = model, Chosen()
        self.loaded: dict[str, dict[str, Factors]] = {}  # by name, then by the path of a leaf
        self.placed: dict[str, ManyModule] = {}  # by the path of a leaf
        check_bare(model)

    def load(self, name: str, kind: AdapterKind, tensors: Mapping[str, Tensor]) -> None:
        """Add an adapter, given by its kind and its tensors (path -> tensor). For inference: not trained, not saved."""
        if name in self.loaded:
            raise InputError(f"adapter: {name!r} is loaded already; unload it first")
        if not isinstance(kind, Lora) or kind.adapter() is not LoraModule:
            raise SpecError("adapter", f"{kind.kind}: rows can have different adapters only with lora")
        check_bare(self.model, self.placed.values())
        self.loaded[name] = self._read(kind, tensors)
        self._place()

    def _read(self, kind: Lora, tensors: Mapping[str, Tensor]) -> dict[str, Factors]:
        """The factors by the path of a leaf. Leaves with one weight have one adapter."""
        model, weights = self.model, {d.path: d for d in declared(self.model.part)}
        owners = {leaf_path(d): d.weight.same_as or d.path for d in targeted(kind, model.part)}
        wanted = {owner: kind.declare(weights[owner]) for owner in owners.values()}
        check_tensors({d.path: d.weight.shape(d.scope) for own in wanted.values() for d in own}, tensors)
        for path, tensor in tensors.items():
            if value := nonfinite(tensor):
                raise FileError(f"{path}: holds {value}; train the adapter with a lower learning rate")
        factors: dict[str, Factors] = {}
        for owner, own in wanted.items():
            found = {d.weight.name: tensors[d.path].to(model.device, model.dtype) for d in own}
            factors[owner] = Factors(found["a"], found["b"] * kind.factor)
        return {path: factors[owner] for path, owner in owners.items()}

    def unload(self, name: str) -> None:
        """Remove an adapter."""
        self._known(name)
        del self.loaded[name]
        self._place()

    @contextmanager
    def rows(self, names: Sequence[str | None]) -> Iterator[None]:
        """Within this context row i of a batch, or token i of a flat batch, has the adapter of names[i]; None: none."""
        numbers = {name: i for i, name in enumerate(self.loaded)}
        for name in {name for name in names if name is not None}:
            self._known(name)
        index = [len(numbers) if name is None else numbers[name] for name in names]
        before, self.chosen.index = self.chosen.index, torch.tensor(index, dtype=torch.int64, device=self.model.device)
        try:
            yield
        finally:
            self.chosen.index = before

    def _known(self, name: str) -> None:
        if name not in self.loaded:
            raise InputError(f"adapter: {name!r} is not loaded; {names_or_nearest(name, self.loaded, 'adapters')}")

    def _place(self) -> None:
        """Give each leaf that some adapter targets the factors of all of them."""
        for path in self.placed:
            self._leaf(path).adapter = None
        made: dict[tuple[int, ...], ManyModule] = {}
        self.placed = {}
        for path in dict.fromkeys(path for own in self.loaded.values() for path in own):
            of = [own.get(path) for own in self.loaded.values()]
            key = tuple(0 if one is None else id(one) for one in of)
            if key not in made:
                made[key] = ManyModule(of, self.chosen, path)
            self._leaf(path).adapter = self.placed[path] = made[key]

    def _leaf(self, path: str) -> Linear:
        leaf = self.model.get_submodule(path)
        assert isinstance(leaf, Linear)
        return leaf


class ManyModule(Adapter):
    """a (adapters + 1, …, rank, inp), b (adapters + 1, …, out, rank); those of an adapter without this leaf, and the last, are
    zero."""

    exact: frozenset[Offer] = frozenset({"grouped"})
    removed_by = "unload the adapters of the bank, or of the engine, that it belongs to first"

    def __init__(self, of: Sequence[Factors | None], chosen: Chosen, path: str) -> None:
        super().__init__()
        self.chosen, self.path = chosen, path
        some = [one for one in of if one is not None]
        rank = max(factors.a.shape[-2] for factors in some)
        a, b = _padded(some[0], rank)
        nothing = Factors(torch.zeros_like(a), torch.zeros_like(b))
        padded = [*(nothing if one is None else _padded(one, rank) for one in of), nothing]
        self.register_buffer("a", torch.stack([factors.a for factors in padded]), persistent=False)
        self.register_buffer("b", torch.stack([factors.b for factors in padded]), persistent=False)
        self.a: Tensor
        self.b: Tensor

    def forward(self, leaf: Linear, x: Tensor, ctx: Ctx | None) -> Tensor:
        y, index = leaf.storage.multiply(leaf, x, ctx), self.chosen.of(x.shape[0], self.path)
        rows = x.unsqueeze(1) if x.dim() == 2 else x
        a, b = (one.index_select(0, index).to(x.dtype) for one in (self.a, self.b))
        small = torch.bmm(rows.flatten(1, -2), a.transpose(1, 2))
        return torch.baddbmm(y.reshape(len(y), -1, y.shape[-1]), small, b.transpose(1, 2)).view(y.shape)

    def grouped(self, leaf: Linear, x: Tensor, rows: Rows, ctx: Ctx | None) -> Tensor:
        """Each row by its adapter's factors for its expert: adapter by adapter, the rows of others as zeros."""
        y = leaf.storage.grouped(leaf, x, rows, ctx)
        index = self._of_choices(rows)
        for i in range(len(self.a) - 1):
            own = torch.where((index == i)[:, None], x, 0.0)
            y = y + rows.multiply(rows.multiply(own, self.a[i].to(x.dtype)), self.b[i].to(x.dtype))
        return y

    def _of_choices(self, rows: Rows) -> Tensor:
        """(rows,) the adapter of each row of a bank of experts: that of its token."""
        index = self.chosen.given(self.path)
        per_row = len(rows.choice) // len(index)  # tokens of a row, times choices of a token
        return index.index_select(0, rows.choice // per_row)

    def matrix(self, leaf: Linear, ctx: Ctx | None = None) -> Tensor:
        raise InputError(f"{self.path}: rows have different adapters, so there is no one matrix")


def _padded(factors: Factors, rank: int) -> Factors:
    """The same change of W with zeros up to a larger rank."""
    more = rank - factors.a.shape[-2]
    return factors if not more else Factors(F.pad(factors.a, (0, 0, 0, more)), F.pad(factors.b, (0, more)))
