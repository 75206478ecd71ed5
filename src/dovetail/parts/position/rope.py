"""RoPE: each pair of channels of q and k is rotated by an angle proportional to the position.

    (a, b) ← (a cos θ − b sin θ, b cos θ + a sin θ)        θ = p · base^(−i/pairs) for pair i

so that a score depends on the distance alone. Pairs are `half` (channel i with i + d/2: Llama, NeoX) or `adjacent` (2i with
2i + 1: the paper, GPT-J). With 2 or 3 coordinates each gets an equal part of the pairs, with frequencies of its own; with
`sections` (multimodal RoPE, mrope) there is one series of frequencies, and sections of its pairs take one coordinate each:

    θ = p_c · base^(−i/pairs)        c = 0 for the first sections[0] pairs, 1 for the next sections[1], … (Qwen2-VL: 16, 24, 24)

so that text, whose coordinates are equal, is rotated as by plain RoPE. Keys are rotated when written to the cache, or when read
(then the cache holds no rotated key: streaming, and scalings that change with length).
Su et al. 2021; Wang et al. 2024 (mrope)
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from dovetail.nn.groups import WRONG_SCALING, Position, PositionModule, Scaling
from dovetail.nn.layout import TokenLayout
from dovetail.spec.field import bounded
from dovetail.spec.part import Problem, broken, register
from dovetail.spec.part_proof import FieldCause, Proof
from dovetail.spec.scope import Scope
from dovetail.spec.weight import Weight


@register("rope")
class Rope(Position):
    """Rotary position embedding of queries and keys."""

    rotates: ClassVar[bool] = True

    base: float = bounded(10000.0, above=1)
    fraction: float = bounded(1.0, above=0, at_most=1)  # of a head's channels that are rotated, the first ones
    pairs: Literal["half", "adjacent"] = "half"
    coords: int = bounded(1, at_least=1, at_most=3)  # 1 text, 2 image, 3 video
    sections: tuple[int, ...] = bounded((), above=0)  # mrope: pairs per coordinate; (): each has frequencies of its own
    when: Literal["write", "read"] = "write"
    scaling: Scaling | None = None

    def coordinates(self) -> int:
        return self.coords

    def rotates_on_read(self) -> bool:
        return self.when == "read"

    def axes(self, scope: Scope) -> Scope:
        return scope.add(pair=self.rotary_dim(scope) // 2 // self.ladders())

    def ladders(self) -> int:
        """The number of series of frequencies that the pairs are divided into."""
        return 1 if self.sections else self.coords

    def rotary_dim(self, scope: Scope) -> int:
        """The number of rotated channels of a head."""
        return int(scope.size("head") * self.fraction)

    def weights(self, scope: Scope) -> list[Weight]:
        varies = self.scaling is not None and self.scaling.varies
        return [
            Weight(name="frequency", out=("pair",), role="const"),
            *([Weight(name="unstretched", out=("pair",), role="const")] if varies else []),
            *([Weight(name="coordinate", out=("pair",), role="const", dtype="int64")] if self.sections else []),
        ]

    def plain(self, scope: Scope) -> Tensor:
        """(pairs,) frequencies of one coordinate, before scaling."""
        pairs = scope.size("pair")
        return self.base ** -(torch.arange(pairs, dtype=torch.float64) / pairs)

    def constant(self, name: str, scope: Scope) -> Tensor:
        if name == "coordinate":  # of each pair
            return torch.tensor([c for c, pairs in enumerate(self.sections) for _ in range(pairs)])
        if self.scaling is None or name == "unstretched":
            return self.plain(scope)
        return self.scaling.frequencies(self.plain(scope), self.base)

    def check(self, scope: Scope) -> list[Problem]:
        rotary_dim, token_coords, head = self.rotary_dim(scope), scope.size("coords"), scope.size("head")
        pairs, coords, sections, each = scope.size("pair"), self.coords, self.sections, 2 * self.ladders()
        unpaired = f"{rotary_dim} rotated channels of {head} cannot be paired for {self.ladders()} coordinate(s)"
        return broken(
            (
                coords != 1 and token_coords not in (1, coords),
                "coords",
                f"{coords} coordinates for tokens with {token_coords}",
                "use 1, or as many as the tokens have",
            ),
            (rotary_dim == 0 or rotary_dim % each, "fraction", unpaired, f"make head · fraction a multiple of {each}"),
            (
                sections and (len(sections) != coords or coords == 1),
                "sections",
                f"{len(sections)} sections for {coords} coordinate(s)",
                "give one per coordinate, of 2 or 3 coordinates, or none",
            ),
            (
                sections and (min(sections) < 1 or sum(sections) != pairs),
                "sections",
                f"{list(sections)} do not divide the {pairs} rotated pairs of a head",
                f"give numbers from 1 on whose sum is {pairs}",
            ),
        )[:1] or ([] if self.scaling is None else self.scaling.check(scope))

    def whole_prefill(self, scope: Scope) -> str | None:
        if self.scaling is None or not self.scaling.varies:
            return None
        return f"{self.scaling.kind}: angles depend on the current length of the sequence"


class RopeProof(Proof, of=Rope):
    """Sampled values, causes and idle fields."""

    causes = {
        "pairs": FieldCause("rotary pair order"),
        "base": FieldCause("rope base", (1e4, 5e5, 1e6, 1e5, 1e3, 500.0, 300.0, 100.0, 1.6e5, 5e6, 8e6, 1e7, 1.5e5)),
        "fraction": FieldCause("rotary fraction", (1.0, 0.5, 0.25, 0.75)),
        "scaling": WRONG_SCALING,
        "sections": FieldCause("mrope sections"),
    }
    samples = {
        "base": [10000.0, 100.0],
        "fraction": [1.0, 0.5],
        "pairs": ["half", "adjacent"],
        "coords": [1, 2, 3],
        "sections": [(), (2, 4), (1, 2, 3)],
        "when": ["write", "read"],
    }

    def idle(self, part: Rope, scope: Scope) -> frozenset[str]:
        no_cache = set() if scope.decodes else {"when"}
        # base⁰ = 1 whatever the base
        one_pair = {"base"} if not part.constant("frequency", scope)[1:].any() else set()
        return frozenset(no_cache | one_pair)


class RopeModule(PositionModule, of=Rope):
    """q, k (…, n, heads, head) -> like them."""

    part: Rope
    frequency: Tensor
    unstretched: Tensor
    coordinate: Tensor  # (pairs,)

    def setup(self) -> None:
        self.rotary_dim, self.halves = self.part.rotary_dim(self.scope), self.part.pairs == "half"
        self.key = f"{self.part.key} {self.scope.size('pair')}"

    def rotate(self, q: Tensor, layout: TokenLayout) -> Tensor:
        return self.turn(q, layout)

    def on_write(self, k: Tensor, layout: TokenLayout) -> Tensor:
        return self.turn(k, layout) if self.part.when == "write" else k

    def on_read(self, k: Tensor, layout: TokenLayout) -> Tensor:
        return self.turn(k, layout) if self.part.when == "read" else k

    def turn(self, x: Tensor, layout: TokenLayout) -> Tensor:
        """x (…, n, heads, head) rotated, each token by its own angle: x cos θ ± (the other of its pair) sin θ."""
        key = (self.key, x.dtype, x.device)
        tables = layout.memo.get(key)
        if tables is None:
            cos, sin = self.angles(layout, x.dtype)
            tables = layout.memo[key] = self.paired(cos, cos), self.paired(-sin, sin)
        cos, sin = tables
        unrotated = None
        if self.rotary_dim < x.shape[-1]:
            x, unrotated = x[..., : self.rotary_dim], x[..., self.rotary_dim :]
        a, b = x.chunk(2, -1) if self.halves else (x[..., 0::2], x[..., 1::2])
        other = torch.cat((b, a), -1) if self.halves else self.paired(b, a)
        rotated = x * cos + other * sin
        return rotated if unrotated is None else torch.cat([rotated, unrotated], -1)

    def paired(self, a: Tensor, b: Tensor) -> Tensor:
        """(…, channels), of which a (…, pairs) are the first of each pair and b the second."""
        return torch.cat((a, b), -1) if self.halves else torch.stack((a, b), -1).flatten(-2)

    def angles(self, layout: TokenLayout, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin (…, n, 1, pairs), computed in float32 or wider."""
        frequency = self.frequency.to(angle_dtype(dtype))
        scaling = self.part.scaling
        if scaling is not None and scaling.varies:
            plain = self.unstretched.to(frequency)
            frequency = scaling.at_length(plain, self.part.base, lengths(layout))[..., None, :]
        coords = layout.coords_for(self.part.coords)
        if self.part.sections:
            angle = coords.index_select(-1, self.coordinate)[..., None, :] * frequency
        else:
            angle = (coords[..., None] * frequency).flatten(-2)[..., None, :]
        cos, sin = angle.cos(), angle.sin()
        if scaling is not None:
            cos, sin = cos * scaling.amplitude(), sin * scaling.amplitude()
        return cos.to(dtype), sin.to(dtype)


def angle_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of angles: float32 or wider."""
    return torch.promote_types(dtype, torch.float32)


def lengths(layout: TokenLayout) -> Tensor:
    """(…, n) the current length of the document of each token; in a flat batch a row is one document."""
    last = torch.where(layout.real, layout.order, 0)
    document = layout.seg.clamp_min(0) if layout.row is None else layout.row
    documents = layout.n if layout.row is None else layout.rows  # a flat step can have fewer tokens than rows
    longest = last.new_zeros(*last.shape[:-1], documents).scatter_reduce(-1, document, last, "amax")
    return longest.gather(-1, document) + 1
