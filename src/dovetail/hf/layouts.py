"""The layouts in which weights of fewer bits are exported: a field of config.json, and the tensors of each matrix.

compressed-tensors   int4, int8, fp8        hf/compressed.py
gptq, awq            int4                   hf/four_bits.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from dovetail.core.errors import UsageError
from dovetail.core.suggest import names_or_nearest
from dovetail.hf.compressed import Leaves, compressed_tensors, quantization_config
from dovetail.hf.four_bits import awq_config, awq_tensors, gptq_config, gptq_tensors
from dovetail.hf.tensors import Move
from dovetail.model import Model
from dovetail.weights.quantization.leaf import QuantizedLinear


class Layout(NamedTuple):
    """How a library holds weights of fewer bits; both functions raise SpecError with the path of what it cannot hold."""

    config: Callable[[Model, Sequence[Move], Leaves], dict[str, Any]]  # the quantization_config
    tensors: Callable[[str, QuantizedLinear], dict[str, Tensor]]  # of the leaf at a path, by their names behind its stem


DEFAULT = "compressed-tensors"
LAYOUTS: dict[str, Layout] = {
    DEFAULT: Layout(quantization_config, compressed_tensors),
    "gptq": Layout(gptq_config, gptq_tensors),
    "awq": Layout(awq_config, awq_tensors),
}


def layout_named(name: str) -> Layout:
    """The layout of a name; UsageError for an unknown one."""
    if name not in LAYOUTS:
        raise UsageError(f"--layout {name}: no such layout; {names_or_nearest(name, LAYOUTS, 'layouts')}")
    return LAYOUTS[name]
