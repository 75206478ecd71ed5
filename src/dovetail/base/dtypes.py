"""Names of dtypes: the one vocabulary of the command line and of Python arguments. Torch is imported only where it is needed.

float64, float32, bfloat16, float16        torch's names; a model computes in these
float8                                     of stored weights, in forecasts
fp64, fp32, bf16, fp16, fp8                short names, accepted everywhere
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.base.errors import SpecError

if TYPE_CHECKING:
    import torch

SHORT = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "float8"}
NAMES = tuple(SHORT.values())


def dtype_name(text: str) -> str:
    """Return torch's name of a dtype: bf16 is bfloat16."""
    name = text.removeprefix("torch.").lower()
    name = SHORT.get(name, name)
    if name in ("int8", "int4", "nf4"):
        formats = "it is a format of stored weights, which quantize writes"
        remedy = f"{formats}; dtypes: {', '.join(NAMES)}"
        raise SpecError("dtype", f"{name} is not a floating-point dtype", remedy)
    if name not in NAMES:
        raise SpecError("dtype", f"{text[:40]!r} is not a dtype", f"use one of {', '.join(NAMES)}")
    return name


def short_dtype_name(text: str) -> str:
    """Return the short name of a dtype: bfloat16 is bf16."""
    name = dtype_name(text)
    return next(short for short, full in SHORT.items() if full == name)


def dtype_of(name: str | torch.dtype) -> torch.dtype:
    """Return the floating-point dtype of a name: `bfloat16`, `bf16`, `torch.bfloat16`, or the dtype itself."""
    import torch

    text = str(name).removeprefix("torch.")
    full = SHORT.get(text, text)
    if full not in NAMES or full == "float8":
        raise SpecError("dtype", f"{name!r} is not a dtype of weights", f"use one of {', '.join(NAMES[:-1])}")
    return getattr(torch, full)
