"""Names of dtypes: the one vocabulary of the command line and of Python arguments."""

from __future__ import annotations

import torch

from dovetail.core.errors import SpecError

DTYPES: dict[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
SHORT = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def dtype_of(name: str | torch.dtype) -> torch.dtype:
    """Return the floating-point dtype of a name: `bfloat16`, `bf16`, `torch.bfloat16`, or the dtype itself."""
    if isinstance(name, torch.dtype):
        name = str(name)
    full = name.removeprefix("torch.")
    full = SHORT.get(full, full)
    if full not in DTYPES:
        raise SpecError("dtype", f"{name!r} is not a dtype of weights", f"use one of {', '.join(DTYPES)}")
    return DTYPES[full]
