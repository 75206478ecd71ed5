"""Format: how a matrix W is stored in fewer bits. A frozen dataclass that declares its tensors; plain functions of tensors.

    W (…, out, inp) in groups of `group` inputs, each with a scale s (and perhaps a zero point z)

    w ≈ s · level[code]            nearest(w, grid) -> code          value(code, grid) -> s · level[code]
    encode(W) -> tensors           decode(tensors) -> W              both whole, tensor by tensor

What a file holds, and how many bytes, is `tensors(shape)`. A code is the nearest level of its grid, and the grid covers the
group, so that the error of a value is at most half the distance between two levels. Encoding a decoded matrix again on its own
grid gives the same codes (law 26). GPTQ chooses other codes on the same grid.

Shapes: codes (…, out, inp)   scale, zero (…, out, groups)   packed (…, out, ⌈inp / 2⌉) for two codes per byte.
"""

from __future__ import annotations

import dataclasses as dc
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, ClassVar, NamedTuple, TypeVar, dataclass_transform

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.base.errors import SpecError, names_or_nearest

CODES, SCALE, ZERO = "weight_packed", "weight_scale", "weight_zero_point"
FORMATS: dict[str, type[Format]] = {}
C = TypeVar("C", bound="type[Format]")
NIBBLES = 2  # per byte


class Grid(NamedTuple):
    """The scales of a matrix and, where the format has them, its zero points, each (…, out, groups)."""

    scale: Tensor
    zero: Tensor | None = None

    def of(self, group: int) -> Grid:
        """The grid of one group, (…, out, 1)."""
        pick = slice(group, group + 1) if self.scale.shape[-1] > 1 else slice(None)
        return Grid(self.scale[..., pick], None if self.zero is None else self.zero[..., pick])


@dataclass_transform(kw_only_default=True, frozen_default=True)
def register_format(kind: str) -> Callable[[C], C]:
    """Make the class a frozen dataclass that recipes can name by `kind`."""

    def decorate(cls: C) -> C:
        made = dc.dataclass(frozen=True, kw_only=True)(cls)
        made.kind = kind
        FORMATS[kind] = made
        return made

    return decorate


@dc.dataclass(frozen=True, kw_only=True)
class Format(ABC):
    """The base of every format."""

    kind: ClassVar[str] = ""
    bits: ClassVar[int] = 8  # of a code

    # -- what a leaf multiplies W by

    @property
    def rounds_inputs(self) -> bool:
        """Whether a leaf rounds its inputs: x Wᵀ is then no product with a matrix, and has no exact `matrix`."""
        return False

    def inputs(self, x: Tensor) -> Tensor:
        """x (…, inp) as a leaf multiplies W by it."""
        return x

    # -- declarations

    @abstractmethod
    def tensors(self, shape: Sequence[int]) -> dict[str, Tensor]:
        """The tensors that stand for a matrix of this shape, by name, on the meta device."""

    @abstractmethod
    def bits_per_weight(self, inp: int) -> Fraction:
        """The size of one weight of a row of `inp`, with its part of the scales."""

    @abstractmethod
    def levels(self, zero: Tensor | None) -> Tensor:
        """(levels,) what the codes stand for in units of the scale, ascending; with zero points (…, levels)."""

    def size(self, inp: int) -> int:
        """The number of inputs that share a scale."""
        return inp

    def check(self, shape: Sequence[int]) -> str:
        """Why a matrix of this shape has no such form; empty where it has one."""
        return ""

    # -- the grid

    @abstractmethod
    def fit(self, grouped: Tensor) -> dict[str, Tensor]:
        """The tensors of a grid that covers grouped values (…, out, groups, size)."""

    def grid(self, tensors: Mapping[str, Tensor]) -> Grid:
        """The grid that the tensors hold."""
        return Grid(tensors[SCALE])

    # -- codes; scale and zero broadcast to w

    @abstractmethod
    def nearest(self, w: Tensor, grid: Grid) -> Tensor:
        """The code of the level nearest to each value."""

    @abstractmethod
    def value(self, codes: Tensor, grid: Grid) -> Tensor:
        """What the codes stand for, in the dtype that the scale promotes to float32."""

    def pack(self, codes: Tensor) -> Tensor:
        """Codes as a file holds them."""
        return codes

    def unpack(self, packed: Tensor, inp: int) -> Tensor:
        """The codes of `inp` inputs."""
        return packed

    # -- whole matrices

    def encode(self, w: Tensor, grid: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """The tensors that stand for a matrix (…, out, inp), each value by its nearest level; `grid`: the tensors of a grid to
        use instead of one that is fitted to the matrix."""
        grouped = self.grouped(w)
        tensors = self.fit(grouped) if grid is None else grid
        return self.packed(self.nearest(grouped, _column(self.grid(tensors))).flatten(-2), tensors)

    def packed(self, codes: Tensor, grid: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of a matrix of codes on a grid."""
        return {CODES: self.pack(codes), **{name: tensor for name, tensor in grid.items() if name != CODES}}

    def codes(self, tensors: Mapping[str, Tensor], inp: int) -> Tensor:
        """The codes (…, out, inp)."""
        return self.unpack(tensors[CODES], inp)

    def decode(self, tensors: Mapping[str, Tensor], inp: int) -> Tensor:
        """The matrix (…, out, inp), in float32."""
        return self.value(self.grouped(self.codes(tensors, inp)), _column(self.grid(tensors))).flatten(-2)

    def grouped(self, w: Tensor) -> Tensor:
        """(…, out, inp) -> (…, out, groups, size)."""
        return w.unflatten(-1, (-1, self.size(w.shape[-1])))

    # -- plain data

    def to_data(self) -> dict[str, Any]:
        """The kind and all fields."""
        return {"kind": self.kind, **dc.asdict(self)}


def _column(grid: Grid) -> Grid:
    """The grid beside grouped values: (…, out, groups, 1)."""
    return Grid(grid.scale[..., None], None if grid.zero is None else grid.zero[..., None])


def format_from(data: Any, where: str = "format") -> Format:
    """The format of plain data: a kind, or a mapping with a kind and fields."""
    fields = {"kind": data} if isinstance(data, str) else data
    if not isinstance(fields, Mapping):
        raise SpecError(where, f"expected a format, got {data!r}", "give the name of a kind, or a mapping")
    kind = fields.get("kind")
    if not isinstance(kind, str) or kind not in FORMATS:
        raise SpecError(where, f"no format is called {kind!r}", names_or_nearest(str(kind), FORMATS, "formats"))
    known = {field.name: field for field in dc.fields(FORMATS[kind])}
    for name in fields:
        if name != "kind" and name not in known:
            raise SpecError(f"{where}.{name}", f"{kind} has no such field", names_or_nearest(str(name), known, "fields"))
    try:
        return FORMATS[kind](**{name: value for name, value in fields.items() if name != "kind"})
    except TypeError as error:  # a field of another type, in a file
        raise SpecError(where, f"a field of {kind} has a value of the wrong type ({error})") from error


def checked(name: str, value: Any, holds: bool, remedy: str) -> None:
    """Raise SpecError for a field of a format with a wrong value."""
    if not holds:
        raise SpecError(name, f"{value!r} is not a value of this field", remedy)


# -- two codes per byte ---------------------------------------------------------------------------------------------


def pack_nibbles(codes: Tensor) -> Tensor:
    """(…, n) of 0 … 15 -> (…, ⌈n / 2⌉) bytes, the low half first; an odd row ends with a zero."""
    even = F.pad(codes, (0, codes.shape[-1] % NIBBLES))
    return even[..., 0::2] | (even[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor, n: int) -> Tensor:
    """The inverse."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)[..., :n]


# -- scales of 16 bits ----------------------------------------------------------------------------------------------


def stored_scale(scale: Tensor, up: bool = False) -> Tensor:
    """A scale as bfloat16, which with a code of 8 bits has an exact product in float32; 1 for a group of zeros. With `up` it is
    not smaller than before, so that no value lies outside of the levels."""
    scale = torch.where(scale > 0, scale, 1.0)
    short = scale.to(torch.bfloat16)
    if up:
        short = torch.where(short.to(scale.dtype) < scale, torch.nextafter(short, torch.full_like(short, torch.inf)), short)
    return short.clamp(min=torch.finfo(torch.bfloat16).tiny)
