"""The adapters of an engine's model, by name. They are loaded and unloaded while requests run, between two steps.

    name in requests -> slot              a name that is loaded again is another slot: cached prefixes belong to a slot

An adapter that was unloaded stays until the last request that uses it has ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import count

from torch import Tensor

from dovetail.base.errors import InputError, names_or_nearest
from dovetail.base.limits import SERVED_ADAPTERS
from dovetail.model.model import ModelModule
from dovetail.nn.declared_tensors import adapted_leaves
from dovetail.weights.adapters.kind import AdapterKind
from dovetail.weights.adapters.multi_lora import Bank


class Adapters:
    """Names, slots, and the bank that computes with them."""

    def __init__(self, model: ModelModule) -> None:
        own = next(adapted_leaves(model), None) is not None  # of the directory that is served: it is part of the model
        self.bank = None if own else Bank(model)
        self.slots: dict[str, str] = {}  # by name
        self.leaving: set[str] = set()
        self.numbers = count()

    def load(self, name: str, kind: AdapterKind, tensors: Mapping[str, Tensor]) -> None:
        """Add an adapter. Raises InputError where the name is taken, and what `Bank.load` raises."""
        if self.bank is None:
            raise InputError("adapter: the model has an adapter of its own; merge it first (dovetail merge)")
        if name in self.slots:
            raise InputError(f"adapter: {name!r} is loaded already; unload it first")
        if len(self.bank.loaded) >= SERVED_ADAPTERS:
            raise InputError(f"adapter: {SERVED_ADAPTERS} are loaded, which is the most; unload one first")
        slot = f"{name}#{next(self.numbers)}"
        self.bank.load(slot, kind, tensors)
        self.slots[name] = slot

    def unload(self, name: str, used: Iterable[str | None]) -> None:
        """Take no further requests for an adapter; it goes with the last request that uses it. `used`: slots in use."""
        self.leaving.add(self.slot(name))
        del self.slots[name]
        self.drop(used)

    def slot(self, name: str) -> str:
        """The slot of a name; InputError for an unknown one."""
        if name not in self.slots:
            raise InputError(f"adapter: {name!r} is not loaded; {names_or_nearest(name, self.slots, 'adapters')}")
        return self.slots[name]

    def drop(self, used: Iterable[str | None]) -> None:
        """Free the adapters that were unloaded and that no request uses."""
        for slot in self.leaving - set(used):
            assert self.bank is not None
            if slot in self.bank.loaded:  # not so where an interrupt came behind it
                self.bank.unload(slot)
            self.leaving.remove(slot)

    @property
    def loaded(self) -> bool:
        """Whether a row may have an adapter."""
        return self.bank is not None and bool(self.bank.loaded)

    def rows(self, slots: Sequence[str | None]) -> AbstractContextManager[None]:
        """Within this context each row of a batch has the adapter of its slot."""
        return self.bank.rows(slots) if self.bank is not None and self.loaded else nullcontext()
