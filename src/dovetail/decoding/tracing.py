"""trace: the activations of one forward pass, by address; and the same with some of them replaced.

    trace(model, tokens, "*.mixer.pattern")                         {"layers.0.mixer.pattern": (batch, heads, n, n), …}
    trace(model, tokens, "head.logits", patch={"layers.3.mixer_add": 0.0})         logits without the attention of layer 3

An address is the path of a module and the name of a tap; `dovetail.core.fold.taps(spec)` lists them. A listener adds a need,
so a kernel is chosen that computes the activation; nothing else about the forward pass changes.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from dovetail.core.ctx import Ctx, Listen, Listener
from dovetail.core.errors import InputError
from dovetail.core.fold import check_addresses
from dovetail.core.inputs import default_ctx
from dovetail.model import ModelModule

Replacement = Tensor | float | Callable[[Tensor], Tensor]  # a value, or a function of the activation


def trace(
    model: ModelModule,
    tokens: Tensor,
    *patterns: str,
    ctx: Ctx | None = None,
    grad: bool = False,
    patch: Mapping[str, Replacement] | None = None,
) -> dict[str, Tensor]:
    """Return the activations whose addresses match one of the patterns, in the order in which they are computed.

    tokens (batch, n), or another input of the embedding. `ctx` holds the token layout (and the encoder output) of an input that
    is not a batch of whole sequences. With `grad` the activations are part of the graph and keep their gradients: after
    `activations["head.logits"].sum().backward()` each has a `.grad`. `patch` replaces activations: address pattern -> a tensor
    of the same shape, a number, or a function of the activation; the trace then holds the replaced value.
    """
    check_addresses(model.part, [*patterns, *(patch or {})])
    activations: dict[str, Tensor] = {}

    def record(address: str, x: Tensor) -> None:
        if grad and x.requires_grad:
            x.retain_grad()
        activations[address] = x if grad else x.detach().clone()

    patches: list[tuple[str, Listen]] = [(pattern, _replacing(value)) for pattern, value in (patch or {}).items()]
    listener = Listener([*patches, *((pattern, record) for pattern in patterns)])  # in this order: a trace sees the patch
    ctx = ctx or default_ctx(tokens, ranks=model.ranks)
    with torch.set_grad_enabled(grad), torch.compiler.set_stance("force_eager"):  # a listener would recompile a compiled model
        model(tokens, dc.replace(ctx, listen=listener))
    return activations


def _replacing(value: Replacement) -> Callable[[str, Tensor], Tensor]:
    """Return a listener that replaces the activation by `value`."""

    def replace(address: str, x: Tensor) -> Tensor:
        new = value(x) if callable(value) else value
        new = torch.as_tensor(new, dtype=x.dtype, device=x.device)
        if new.dim() and new.shape != x.shape:
            raise InputError(
                f"patch {address}: the replacement has the shape {tuple(new.shape)}, the activation {tuple(x.shape)}"
            )
        return new.expand(x.shape) if new.dim() == 0 else new

    return replace
