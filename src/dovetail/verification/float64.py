"""Wide: code run as if every float32 in it were float64.

Most models compute norms, softmax and angles in float32 whatever their dtype. In their float64 run those islands would round as
they always do, and a gap of 1e-7 could be either. Inside this context every request for float32 is one for float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

ASKED_BY_NAME: dict[Any, Callable[..., Any]] = {torch.Tensor.float: torch.Tensor.double}
READ_AS = frozenset({torch.frombuffer, torch.from_file, torch.Tensor.view})  # here a dtype says what bytes are


class Wide(TorchFunctionMode):
    """Float64 wherever float32 is asked for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function with float64 in the place of float32."""
        if func in READ_AS:
            return func(*args, **(kwargs or {}))
        args = tuple(torch.float64 if one is torch.float32 else one for one in args)
        kwargs = {name: torch.float64 if one is torch.float32 else one for name, one in (kwargs or {}).items()}
        called = ASKED_BY_NAME.get(func) or func
        return called(*args, **kwargs)


@contextmanager
def float32_islands_widened(dtype: torch.dtype = torch.float64) -> Iterator[None]:
    """Where the dtype is float64: everything in here is computed in it, what is made without a dtype too."""
    if dtype != torch.float64:
        yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Wide():
            yield
    finally:
        torch.set_default_dtype(before)
