"""Activation functions, elementwise."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from dovetail.spec.part import Part


class Act(Part):
    """An elementwise activation function. No module: the ffn applies `function`."""

    group: ClassVar[str] = "act"

    @staticmethod
    def function(x: Tensor, /) -> Tensor:
        """The elementwise function of x."""
        raise NotImplementedError
