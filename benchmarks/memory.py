"""Live bytes of tensors: every storage that an operation allocates or returns is counted until it is freed."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Alive(TorchDispatchMode):
    """Within this context `peak` is the largest number of live bytes of tensors allocated in it; `before` is not counted."""

    def __init__(self, *before: Tensor) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known = weakref.WeakSet(tensor.untyped_storage() for tensor in before)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage not in self.known:
            self.known.add(storage)
            self._change(storage.nbytes())
            weakref.finalize(storage, self._change, -storage.nbytes())

    def _change(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)
