"""The dtype of computations that need at least float32."""

from __future__ import annotations

from dovetail.codegen.code import File, fill

AT_LEAST_FP32 = '''
def $name(dtype: torch.dtype) -> torch.dtype:
    """The dtype for angles, softmax and sums over time: at least float32."""
    return torch.promote_types(dtype, torch.float32)
'''


def define_at_least_fp32(file: File) -> None:
    """Define the function `at_least_fp32` in the file."""
    file.define("at_least_fp32", fill(AT_LEAST_FP32))
