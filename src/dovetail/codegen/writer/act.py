"""Activations, each an expression of an expression."""

from __future__ import annotations

from dovetail.codegen.code import fill
from dovetail.codegen.registry import Act, Here, writes

QUICK_GELU = '''
def $name(x: Tensor) -> Tensor:
    """x * sigmoid(1.702 x), an approximation of GELU."""
    return x * torch.sigmoid(1.702 * x)
'''


@writes("relu")
def relu(here: Here) -> Act:
    """max(x, 0)."""
    return "F.relu({})".format


@writes("relu2")
def relu2(here: Here) -> Act:
    """max(x, 0)²."""
    return "F.relu({}).square()".format


@writes("gelu")
def gelu(here: Here) -> Act:
    """x · Φ(x)."""
    return "F.gelu({})".format


@writes("gelu_tanh")
def gelu_tanh(here: Here) -> Act:
    """x · Φ(x), approximated."""
    return 'F.gelu({}, approximate="tanh")'.format


@writes("quick_gelu")
def quick_gelu(here: Here) -> Act:
    """x · σ(1.702 x)."""
    return (here.file.define("quick_gelu", fill(QUICK_GELU)) + "({})").format


@writes("silu")
def silu(here: Here) -> Act:
    """x · σ(x)."""
    return "F.silu({})".format


@writes("sigmoid")
def sigmoid(here: Here) -> Act:
    """σ(x)."""
    return "torch.sigmoid({})".format


@writes("tanh")
def tanh(here: Here) -> Act:
    """tanh x."""
    return "torch.tanh({})".format


@writes("identity")
def identity(here: Here) -> Act:
    """x itself."""
    return "{}".format
