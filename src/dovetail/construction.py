"""spec -> check -> modules on meta -> bytes. Each weight is drawn from (seed, path): swapping one part leaves every other
weight's first value bit-equal, and a model made in pieces equals one made whole."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from dovetail.core.check import check
from dovetail.core.fold import Declared, declared
from dovetail.core.module import at_least_fp32, holder, make
from dovetail.core.scope import Scope
from dovetail.model import Model, ModelModule


def build(spec: Model, *, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu", seed: int = 0) -> ModelModule:
    """A model with initial weights. `device="meta"` gives the structure alone, of any size, in seconds."""
    model = on_meta(spec, dtype)
    if torch.device(device).type != "meta":
        materialize(model, spec, dtype, device, seed)
    return model


def on_meta(spec: Model, dtype: torch.dtype = torch.float32) -> ModelModule:
    """The checked spec as modules without bytes, tied weights being one parameter."""
    check(spec)
    model = make(spec, Scope())
    assert isinstance(model, ModelModule)
    model.to(dtype)
    tie(model, spec)
    return model


def tie(model: nn.Module, spec: Model) -> None:
    """Let every weight that is declared the same as another be that other's parameter."""
    for d in declared(spec):
        if d.weight.same_as is not None:
            module, leaf = holder(model, d.path)
            owner, name = holder(model, d.weight.same_as)
            module.register_parameter(leaf, owner.get_parameter(name))


def materialize(model: nn.Module, spec: Model, dtype: torch.dtype, device: str | torch.device, seed: int) -> None:
    """Give every weight and constant its bytes and first values."""
    set_constants(model, spec, dtype, device)
    for d in declared(spec):
        module, leaf = holder(model, d.path)
        if d.weight.role == "updated":
            module.register_buffer(leaf, initial(d, seed).to(device, at_least_fp32(dtype)))
        elif d.weight.learned:
            module.register_parameter(leaf, nn.Parameter(initial(d, seed).to(device, dtype)))
    tie(model, spec)


def set_constants(model: nn.Module, spec: Model, dtype: torch.dtype, device: str | torch.device) -> None:
    """Give the constants their values, which follow from the spec alone."""
    for d in declared(spec):
        if d.weight.role == "const":
            module, leaf = holder(model, d.path)
            value = d.part.constant(d.weight.name, d.scope)
            module.register_buffer(
                leaf, value.to(device, at_least_fp32(dtype) if value.is_floating_point() else None), persistent=False
            )


def initial(d: Declared, seed: int) -> Tensor:
    """The first value of one weight."""
    shape = d.weight.shape(d.scope)
    if d.weight.init == "ones":
        return torch.ones(shape)
    if d.weight.init == "zeros":
        return torch.zeros(shape)
    if d.weight.init == "const":
        return d.part.constant(d.weight.name, d.scope)
    return torch.randn(shape, generator=generator(seed, d.path)) * d.scope.init.std(d.weight, d.scope)


def generator(seed: int, path: str) -> torch.Generator:
    """A stream of random numbers that belongs to (seed, path) alone."""
    digest = hashlib.blake2b(f"{seed}:{path}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
