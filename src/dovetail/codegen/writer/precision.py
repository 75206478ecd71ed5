"""What is computed in float32 at least."""

from __future__ import annotations

from dovetail.codegen.code import File, fill

WIDE = '''
def $name(dtype: torch.dtype) -> torch.dtype:
    """The dtype of angles, softmax and sums over time: float32 at least."""
    return torch.promote_types(dtype, torch.float32)
'''


def define_at_least_fp32(file: File) -> None:
    """Let the file have a function `wide`."""
    file.define("wide", fill(WIDE))
