"""Build a model: spec -> check -> modules on the meta device -> initial weights.

    weight[i₀, …, j] = std · z(seed, path, (i₀, …), j)          z standard normal or uniform, by counter (nn/random.py)

Each initial value is a function of (seed, path, index). Swapping one part leaves all other initial weights bit-equal, and
`fill_slice` computes a slice of a tensor without the rest, so that each rank initializes its own shard
(parallel/construction.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod

import torch
from torch import Tensor, nn

from dovetail.model.model import Model
from dovetail.model.transformer import Transformer
from dovetail.nn.declared_tensors import held
from dovetail.nn.module import at_least_fp32, holder
from dovetail.nn.random import NumberBlock, normal_block, normal_blocks, streams, uniform_block
from dovetail.spec.check import check
from dovetail.spec.fold import Declared, declared
from dovetail.spec.part import Part
from dovetail.spec.scope import Scope

SAMPLED = {"normal": normal_block, "uniform": uniform_block}
CHUNK = 2**14  # pairs of numbers per pass: temporaries stay in the processor's cache


def build(spec: Model, *, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu", seed: int = 0) -> Transformer:
    """Build a model with initial weights, in evaluation mode; `model.train()` turns dropout and router noise on.
    `device="meta"` gives the structure without memory, for any size."""
    model = on_meta(spec, dtype)
    if torch.device(device).type != "meta":
        materialize(model, spec, dtype, device, seed)
    return model


def on_meta(spec: Model, dtype: torch.dtype = torch.float32) -> Transformer:
    """Check the spec and build its modules on the meta device; tied weights are one parameter."""
    check(spec)
    model = Transformer(spec, Scope())
    model.to(dtype)
    tie(model, spec)
    return model.eval()


def tie(model: nn.Module, spec: Part) -> None:
    """Make every weight declared `same_as` another that weight's parameter."""
    for d in held(model, spec):
        if d.weight.same_as is not None:
            module, leaf = holder(model, d.path)
            owner, name = holder(model, d.weight.same_as)
            if module._parameters is owner._parameters:  # one leaf in both places, or twins
                continue
            if d.weight.buffer:
                module.register_buffer(leaf, owner.get_buffer(name))
            else:
                module.register_parameter(leaf, owner.get_parameter(name))


def materialize(model: nn.Module, spec: Model, dtype: torch.dtype, device: str | torch.device, seed: int) -> None:
    """Allocate every weight and constant, and set its initial value."""
    set_constants(model, spec, dtype, device)
    for d, value in initials((d for d in declared(spec) if d.weight.stored), seed):
        put(model, d, value.to(device, at_least_fp32(dtype) if d.weight.buffer else dtype))
    tie(model, spec)


def put(model: nn.Module, d: Declared, value: Tensor) -> None:
    """Make a tensor the parameter or buffer that is declared."""
    module, leaf = holder(model, d.path)
    if d.weight.buffer:
        module.register_buffer(leaf, value)
    else:
        module.register_parameter(leaf, nn.Parameter(value))


def set_constants(
    model: nn.Module,
    spec: Model,
    dtype: torch.dtype,
    device: str | torch.device,
    pieces: Mapping[str, tuple[slice, ...]] | None = None,
) -> None:
    """Set the constants, which follow from the spec; with `pieces`, the slice of each that this rank holds."""
    for d in held(model, spec):
        if d.weight.role == "const":
            module, leaf = holder(model, d.path)
            value = d.part.constant(d.weight.name, d.scope)
            if pieces is not None:
                value = value[pieces[d.path]].clone()  # not a view, which would keep the whole
            module.register_buffer(
                leaf, value.to(device, at_least_fp32(dtype) if value.is_floating_point() else None), persistent=False
            )


def initial(d: Declared, seed: int) -> Tensor:
    """Return the initial value of one weight, in float32 (a constant in its own dtype)."""
    return initial_slice(d, seed, ())


def initial_slice(d: Declared, seed: int, slices: Sequence[slice]) -> Tensor:
    """Return initial(d, seed)[slices], bit-equal, without computing the rest. One slice per dimension, of step 1; dimensions
    without one are whole."""
    if d.weight.init == "const":
        return d.part.constant(d.weight.name, d.scope)[tuple(slices)]
    out = torch.empty([len(r) for r in _ranges(d.weight.shape(d.scope), slices)])
    fill_slice(d, seed, slices, out)
    return out


def fill_slice(d: Declared, seed: int, slices: Sequence[slice], out: Tensor) -> None:
    """Write initial(d, seed)[slices] into `out`, contiguous and of any dtype, tile by tile: no second copy is allocated."""
    if d.weight.init == "const":
        out.copy_(d.part.constant(d.weight.name, d.scope)[tuple(slices)])
        return
    sampled = SAMPLED.get(d.weight.init)
    if sampled is None:
        out.fill_(1.0 if d.weight.init == "ones" else 0.0)
        return
    shape = d.weight.shape(d.scope)
    *leading, columns = [range(1), *_ranges(shape, slices)]  # a scalar is one row of one column
    rows = torch.zeros(1, dtype=torch.int64)
    for size, r in zip((1, *shape), leading, strict=False):
        rows = (rows[:, None] * size + torch.arange(r.start, r.stop)).flatten()
    out = out.view(len(rows), len(columns))
    stream = _streams([d], seed)[0]
    tile = max(1, CHUNK // max(1, len(columns) // 2))
    for top in range(0, len(rows), tile):
        for left in range(columns.start, columns.stop, 2 * CHUNK):
            right = min(left + 2 * CHUNK, columns.stop)
            block = NumberBlock(stream, rows[top : top + tile], left, right, _std(d))
            out[top : top + tile, left - columns.start : right - columns.start] = sampled(block)


def initials(weights: Iterable[Declared], seed: int) -> Iterator[tuple[Declared, Tensor]]:
    """Yield (weight, initial(weight, seed)) for each, small ones together: the laws build thousands of small models."""
    small: list[Declared] = []
    for d in weights:
        if d.weight.init != "normal" or d.size > CHUNK:
            yield d, initial(d, seed)
            continue
        small.append(d)
        if sum(one.size for one in small) > CHUNK:
            yield from _together(small, seed)
            small = []
    yield from _together(small, seed)


def _together(small: Sequence[Declared], seed: int) -> Iterator[tuple[Declared, Tensor]]:
    if not small:
        return
    shapes = [(1, *d.weight.shape(d.scope)) for d in small]
    blocks = [
        NumberBlock(stream, torch.arange(prod(shape[:-1])), 0, shape[-1], _std(d))
        for d, stream, shape in zip(small, _streams(small, seed), shapes, strict=True)
    ]
    for d, shape, numbers in zip(small, shapes, normal_blocks(blocks), strict=True):
        yield d, numbers.reshape(shape[1:]).contiguous()  # FSDP takes no other; an odd row is cut from pairs


def _std(d: Declared) -> float:
    """The standard deviation of normal numbers, the bound of uniform ones."""
    return d.scope.size(*d.weight.inp) ** -0.5 if d.weight.init == "uniform" else d.scope.init.std(d.weight, d.scope)


def _streams(weights: Sequence[Declared], seed: int) -> Tensor:
    return streams(torch.tensor(seed), [f"initial {d.path}" for d in weights])


def _ranges(shape: Sequence[int], slices: Sequence[slice]) -> list[range]:
    whole = [slice(None)] * (len(shape) - len(slices))
    return [range(size)[one] for size, one in zip(shape, [*slices, *whole], strict=True)]


def generator(seed: int, path: str) -> torch.Generator:
    """Return a torch generator seeded by (seed, path), for inputs of tests and laws."""
    digest = hashlib.blake2b(f"{seed}:{path}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
