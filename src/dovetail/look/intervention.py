"""Interventions: what replaces an activation. A number, a tensor of the shape of the slice, a function of the activation, or:

    mean_of(run)              the mean over rows and tokens of a recorded run           run: a Trace of the same address
    from_run(run)             the value of another run at the same token
    resample(run, seed)       the value of another row of that run
    noise(std, seed)          plus normal noise, a function of (seed, address, row, position, channel): chunks draw the same
    steer(direction, by)      plus `by` times a unit vector over the last axis
    project_out(direction)    without its component along a direction
    freeze(run)               a patch for every address of a run: from_run at each (patterns, scales of norms)

Each is applied where the target says (`layers.3.mixer.z[head=5, pos=7]`), in full forward passes and in every step of
generation. Tokens that a recorded run does not have stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from dovetail.base.errors import InputError
from dovetail.look.address import TOKENS
from dovetail.look.record import Trace
from dovetail.look.site import Site
from dovetail.nn.random import draw, normals, streams


@runtime_checkable
class Intervention(Protocol):
    """A replacement that depends on the place of the value."""

    def at(self, x: Tensor, site: Site) -> Tensor:
        """Return the value to use instead of x, of the same shape."""
        ...


Replacement = Tensor | float | Callable[[Tensor], Tensor] | Intervention


def applied(replacement: Replacement, x: Tensor, site: Site, mask: Tensor | None) -> Tensor:
    """Return x with the slice that the site means, its mask, replaced."""
    if isinstance(replacement, Intervention):
        new = replacement.at(x, site)
    elif isinstance(replacement, Tensor) and not (mask is None and site.rows is None):
        return _filled(replacement, x, torch.ones((), dtype=torch.bool, device=x.device) if mask is None else mask, site)
    else:
        new = torch.as_tensor(replacement(x) if callable(replacement) else replacement, dtype=x.dtype, device=x.device)
        if new.dim() and new.shape != x.shape:
            what = f"the replacement has the shape {tuple(new.shape)}, the activation {tuple(x.shape)}"
            raise InputError(f"patch {site.target.key}: {what}")
    new = new.to(x.dtype).expand(x.shape)
    return new if mask is None else torch.where(mask, new, x)


def _filled(value: Tensor, x: Tensor, mask: Tensor, site: Site) -> Tensor:
    """x with a tensor in its slice, whose values are in the order of the slice."""
    whole = mask.expand(x.shape)
    count, value = int(whole.sum()), value.to(x)
    if value.numel() == 1:
        return torch.where(mask, value.reshape(()), x)
    if count == 0:
        return x
    part = site.take(x)
    assert part is not None
    squeezed = [size for size in part.shape if size != 1]
    if value.numel() != count or [size for size in value.shape if size != 1] != squeezed:
        what = f"the replacement has the shape {tuple(value.shape)}, the slice {tuple(part.shape)}"
        raise InputError(f"patch {site.target.key}: {what}")
    return x.masked_scatter(whole, value.reshape(-1))


class PerToken:
    """An intervention whose value at a token follows from that token: a call may hold the later ones of a row only."""

    def at(self, x: Tensor, site: Site) -> Tensor:
        """Return the value to use instead of x."""
        raise NotImplementedError


def per_token(replacement: Replacement) -> bool:
    """Whether a replacement has one value however a row is cut into calls."""
    if isinstance(replacement, Tensor):
        return replacement.numel() == 1
    return isinstance(replacement, (float, int, PerToken))


class _Of(PerToken):
    """An intervention with the values of a recorded run."""

    def __init__(self, run: Trace) -> None:
        self.run = run

    def value(self, site: Site) -> Tensor:
        """What the run recorded at the address, as a whole."""
        if site.target.address not in self.run:
            raise InputError(f"patch {site.target.key}: the run has not recorded {site.target.address} as a whole")
        return self.run[site.target.address]


class from_run(_Of):
    """The value of another run at the same token."""

    def at(self, x: Tensor, site: Site) -> Tensor:
        there = self.value(site).to(x)
        if site.rows is not None and len(there) > 1:
            there = there[site.rows]
        axes = [axis for axis in TOKENS if axis in site.target.axes]
        if not axes:
            return there.expand(x.shape)
        known, index = torch.ones(1, dtype=torch.bool, device=x.device).reshape([1] * x.dim()), {}
        for axis in axes:
            dim, positions = site.dim(x, axis), site.positions(x, axis)
            shape = [1] * x.dim()
            shape[0], shape[dim] = positions.shape
            size = there.shape[dim]
            inside = (positions >= 0) & (positions < size)
            known = known & inside.reshape(shape)
            index[dim] = positions.clamp(0, size - 1).reshape(shape)
        if there.shape[0] != x.shape[0]:
            there = there.expand(x.shape[0], *there.shape[1:])
        for dim, where in index.items():
            there = there.take_along_dim(where.expand(*(there.shape[:dim]), -1, *there.shape[dim + 1 :]), dim)
        return torch.where(known, there, x)


class resample(from_run):
    """The value of another row of a run, at the same token: each row takes that of a random other one."""

    def __init__(self, run: Trace, seed: int = 0) -> None:
        super().__init__(run)
        self.seed = seed

    def value(self, site: Site) -> Tensor:
        there = super().value(site)
        if len(there) < 2:
            raise InputError(f"resample {site.target.key}: the run has one row, so no other to take from")
        shift = 1 + self.seed % (len(there) - 1)
        return there.roll(shift, 0)


class mean_of(_Of):
    """The mean of a run over rows and tokens."""

    def at(self, x: Tensor, site: Site) -> Tensor:
        there, tokens = self.value(site).to(x), [axis for axis in TOKENS if axis in site.target.axes]
        if len(tokens) > 1:
            raise InputError(f"mean_of {site.target.key}: a pattern has two axes of tokens; patch it with a function")
        dims = [0, *(site.dim(x, axis) for axis in tokens)]
        return there.mean(dims, keepdim=True).expand(x.shape)


class noise(PerToken):
    """Plus normal noise, a function of the seed, the address, the row, the position and the channel."""

    def __init__(self, std: float = 1.0, seed: int = 0, relative: bool = False) -> None:
        """`relative`: times the activation, instead of in its unit."""
        self.std, self.seed, self.relative = std, seed, relative

    def at(self, x: Tensor, site: Site) -> Tensor:
        stream, coordinates = streams(torch.tensor(self.seed, device=x.device), [site.target.address])[0], list[Tensor]()
        for dim in range(x.dim()):
            axis = site.target.axes[dim - x.dim()] if 0 < dim >= x.dim() - len(site.target.axes) else "row"
            shape = [1] * x.dim()
            if axis in TOKENS:
                positions = site.positions(x, axis)
                shape[0], shape[dim] = positions.shape
                coordinates.append(positions.reshape(shape))
            else:
                shape[dim] = x.shape[dim]
                index = torch.arange(x.shape[dim], device=x.device) if dim or site.rows is None else site.rows
                coordinates.append(index.reshape(shape))
        drawn = self.std * normals(draw(stream, *coordinates))[0].to(x.dtype)
        return x + (x * drawn if self.relative else drawn)


class steer(PerToken):
    """Plus a unit vector over the last axis, times `by`."""

    def __init__(self, direction: Tensor, by: float = 1.0) -> None:
        self.direction, self.by = direction / direction.norm(), by

    def at(self, x: Tensor, site: Site) -> Tensor:
        return x + self.by * _over(self.direction, x, site)


class project_out(PerToken):
    """Without the component along a direction over the last axis."""

    def __init__(self, direction: Tensor) -> None:
        self.direction = direction / direction.norm()

    def at(self, x: Tensor, site: Site) -> Tensor:
        direction = _over(self.direction, x, site)
        return x - (x * direction).sum(-1, keepdim=True) * direction


def _over(direction: Tensor, x: Tensor, site: Site) -> Tensor:
    if direction.shape != x.shape[-1:]:
        raise InputError(
            f"patch {site.target.key}: the direction has the shape {tuple(direction.shape)}, the last axis {x.shape[-1]}"
        )
    return direction.to(x)


def freeze(run: Trace, *patterns: str) -> Mapping[str, Replacement]:
    """A patch that holds every address of a run at its values, or those that the patterns match."""
    from fnmatch import fnmatchcase

    names = [name for name in run if not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)]
    if not names:
        raise InputError(f"freeze: the run has no address that matches {', '.join(patterns)}")
    return dict.fromkeys(names, from_run(run))
