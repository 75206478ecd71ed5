"""Run code in float64 throughout, also where it asks for float32.

Most models compute norms, softmax and rotary angles in float32 whatever their dtype. In a float64 run those operations would
still round to float32, and a gap of 1e-7 could be rounding or a bug. Inside this context every request for float32 is one for
float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

REPLACED: dict[Any, Callable[..., Any]] = {torch.Tensor.float: torch.Tensor.double}
REINTERPRETS = frozenset({torch.frombuffer, torch.from_file, torch.Tensor.view})  # here a dtype says how bytes are read


class Float64Mode(TorchFunctionMode):
    """Replaces float32 by float64 in the arguments of every torch function."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function with float64 in place of float32."""
        if torch.get_default_dtype() is torch.float32:  # set inside: transformers does, while it builds a model from a config
            torch.set_default_dtype(torch.float64)
        if func in REINTERPRETS:
            return func(*args, **(kwargs or {}))
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        kwargs = {name: torch.float64 if arg is torch.float32 else arg for name, arg in (kwargs or {}).items()}
        return (REPLACED.get(func) or func)(*args, **kwargs)


@contextmanager
def float32_islands_widened(dtype: torch.dtype = torch.float64) -> Iterator[None]:
    """Where the dtype is float64: compute everything in float64, tensors made without a dtype included. Else do nothing."""
    if dtype != torch.float64:
        yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Float64Mode():
            yield
    finally:
        torch.set_default_dtype(before)
