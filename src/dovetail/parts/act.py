"""Activations: elementwise functions.

A gated ffn (`glu`) applies them to its gate: `silu` is SwiGLU, `gelu` GeGLU, `identity` the bilinear form (Shazeer 2020),
`sigmoid` the GLU of Dauphin et al. 2016.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.core.group import Act
from dovetail.core.part import register


@register("relu")
class Relu(Act):
    """max(x, 0)."""

    def function(self) -> Callable[[Tensor], Tensor]:
        return F.relu


@register("gelu")
class Gelu(Act):
    """x · Φ(x), by the error function (Hendrycks & Gimpel 2016)."""

    def function(self) -> Callable[[Tensor], Tensor]:
        return F.gelu


@register("gelu_tanh")
class GeluTanh(Act):
    """x · Φ(x), by the tanh approximation of GPT-2 and Gemma."""

    def function(self) -> Callable[[Tensor], Tensor]:
        return _gelu_tanh


@register("quick_gelu")
class QuickGelu(Act):
    """x · σ(1.702 x), the approximation of CLIP."""

    def function(self) -> Callable[[Tensor], Tensor]:
        return _quick_gelu


@register("relu2")
class Relu2(Act):
    """max(x, 0)², squared ReLU (So et al. 2021)."""

    def function(self) -> Callable[[Tensor], Tensor]:
        return _relu2


@register("silu")
class Silu(Act):
    """x · σ(x), also called swish."""

    def function(self) -> Callable[[Tensor], Tensor]:
        return F.silu


@register("sigmoid")
class Sigmoid(Act):
    """1 / (1 + e^(−x))."""

    def function(self) -> Callable[[Tensor], Tensor]:
        return torch.sigmoid


@register("tanh")
class Tanh(Act):
    """(e^x − e^(−x)) / (e^x + e^(−x))."""

    def function(self) -> Callable[[Tensor], Tensor]:
        return torch.tanh


@register("identity")
class Identity(Act):
    """x itself."""

    def function(self) -> Callable[[Tensor], Tensor]:
        return _identity


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


def _identity(x: Tensor) -> Tensor:
    return x
