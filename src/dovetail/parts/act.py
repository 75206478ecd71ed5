"""Activations: elementwise functions.

A gated ffn (`glu`) applies them to its gate: `silu` is SwiGLU, `gelu` GeGLU, `identity` the bilinear form (Shazeer 2020),
`sigmoid` the GLU of Dauphin et al. 2016.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.nn.groups import Act
from dovetail.spec.part import register


@register("relu")
class Relu(Act):
    """max(x, 0)."""

    function = staticmethod(F.relu)


@register("gelu")
class Gelu(Act):
    """x · Φ(x), by the error function (Hendrycks & Gimpel 2016)."""

    function = staticmethod(F.gelu)


@register("gelu_tanh")
class GeluTanh(Act):
    """x · Φ(x), by the tanh approximation of GPT-2 and Gemma."""

    @staticmethod
    def function(x: Tensor, /) -> Tensor:
        return F.gelu(x, approximate="tanh")


@register("quick_gelu")
class QuickGelu(Act):
    """x · σ(1.702 x), the approximation of CLIP."""

    @staticmethod
    def function(x: Tensor, /) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


@register("relu2")
class Relu2(Act):
    """max(x, 0)², squared ReLU (So et al. 2021)."""

    @staticmethod
    def function(x: Tensor, /) -> Tensor:
        return F.relu(x).square()


@register("silu")
class Silu(Act):
    """x · σ(x), also called swish."""

    function = staticmethod(F.silu)


@register("sigmoid")
class Sigmoid(Act):
    """1 / (1 + e^(−x))."""

    function = staticmethod(torch.sigmoid)


@register("tanh")
class Tanh(Act):
    """(e^x − e^(−x)) / (e^x + e^(−x))."""

    function = staticmethod(torch.tanh)


@register("identity")
class Identity(Act):
    """x itself."""

    @staticmethod
    def function(x: Tensor, /) -> Tensor:
        return x
