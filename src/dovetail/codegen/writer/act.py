"""Activations, each an expression of an expression."""

from __future__ import annotations

from dovetail.codegen.code import fill
from dovetail.codegen.registry import Act, Context, writes

QUICK_GELU = '''
def $name(x: Tensor) -> Tensor:
    """x * sigmoid(1.702 x), an approximation of GELU."""
    return x * torch.sigmoid(1.702 * x)
'''


ACTS = {
    "relu": "F.relu({})",
    "relu2": "F.relu({}).square()",
    "gelu": "F.gelu({})",
    "gelu_tanh": 'F.gelu({}, approximate="tanh")',
    "silu": "F.silu({})",
    "sigmoid": "torch.sigmoid({})",
    "tanh": "torch.tanh({})",
    "identity": "{}",
}


@writes(*ACTS)
def act(context: Context) -> Act:
    """An expression of torch's functions."""
    return ACTS[context.part.kind].format


@writes("quick_gelu")
def quick_gelu(context: Context) -> Act:
    """x · σ(1.702 x)."""
    return (context.file.define("quick_gelu", fill(QUICK_GELU)) + "({})").format
