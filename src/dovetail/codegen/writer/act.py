"""Activations, each an expression of an expression."""

from __future__ import annotations

from dovetail.codegen.code import fill
from dovetail.codegen.registry import Act, Context, writes

QUICK_GELU = '''
def $name(x: Tensor) -> Tensor:
    """x * sigmoid(1.702 x), an approximation of GELU."""
    return x * torch.sigmoid(1.702 * x)
'''


@writes("relu")
def relu(context: Context) -> Act:
    """max(x, 0)."""
    return "F.relu({})".format


@writes("relu2")
def relu2(context: Context) -> Act:
    """max(x, 0)²."""
    return "F.relu({}).square()".format


@writes("gelu")
def gelu(context: Context) -> Act:
    """x · Φ(x)."""
    return "F.gelu({})".format


@writes("gelu_tanh")
def gelu_tanh(context: Context) -> Act:
    """x · Φ(x), approximated."""
    return 'F.gelu({}, approximate="tanh")'.format


@writes("quick_gelu")
def quick_gelu(context: Context) -> Act:
    """x · σ(1.702 x)."""
    return (context.file.define("quick_gelu", fill(QUICK_GELU)) + "({})").format


@writes("silu")
def silu(context: Context) -> Act:
    """x · σ(x)."""
    return "F.silu({})".format


@writes("sigmoid")
def sigmoid(context: Context) -> Act:
    """σ(x)."""
    return "torch.sigmoid({})".format


@writes("tanh")
def tanh(context: Context) -> Act:
    """tanh x."""
    return "torch.tanh({})".format


@writes("identity")
def identity(context: Context) -> Act:
    """x itself."""
    return "{}".format
