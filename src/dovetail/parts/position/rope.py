"""Rotary positions: each pair of channels of q and k turns by an angle proportional to the position.

    (a, b) ← (a cos θ − b sin θ, b cos θ + a sin θ)        θ = p · base^(−i/pairs) for pair i

so that a score depends on the distance alone. Pairs are `half` (channel i with i + d/2: Llama, NeoX) or `adjacent` (2i with
2i + 1: the paper, GPT-J). With 2 or 3 coordinates each gets an equal share of the pairs. Keys turn when written, or when read
(then what is remembered knows no position: streaming, and scalings that change with length).       Su et al. 2021
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from dovetail.core.at import At
from dovetail.core.env import Env
from dovetail.core.group import Position, PositionModule, Scaling
from dovetail.core.module import Module, wide
from dovetail.core.part import Problem, register
from dovetail.core.weight import Weight


@register("rope")
class Rope(Position):
    """Queries and keys turn with their position."""

    rotates: ClassVar[bool] = True

    base: float = 10000.0
    share: float = 1.0  # of the head's channels that turn, the first ones
    pairs: Literal["half", "adjacent"] = "half"
    coords: int = 1
    when: Literal["write", "read"] = "write"
    scaling: Scaling | None = None

    def module(self) -> type[Module]:
        return RopeModule

    def axes(self, env: Env) -> Env:
        return env.add(pair=self.turning(env) // 2 // max(self.coords, 1))

    def turning(self, env: Env) -> int:
        """How many channels of a head turn."""
        return int(env.size("head") * self.share)

    def weights(self, env: Env) -> list[Weight]:
        frequency = Weight(name="frequency", out=("pair",), role="const")
        varies = self.scaling is not None and self.scaling.varies
        return [frequency, Weight(name="unstretched", out=("pair",), role="const")] if varies else [frequency]

    def idle(self, env: Env) -> frozenset[str]:
        never_remembered = set() if env.decodes else {"when"}  # written and read at once
        single = {"base"} if env.size("pair") == 1 else set()  # base⁰ = 1 whatever the base
        return frozenset(never_remembered | single)

    def plain(self, env: Env) -> Tensor:
        """(pairs,) unstretched frequencies of one coordinate."""
        pairs = env.size("pair")
        return self.base ** -(torch.arange(pairs, dtype=torch.float64) / pairs)

    def constant(self, name: str, env: Env) -> Tensor:
        if self.scaling is None or name == "unstretched":
            return self.plain(env)
        return self.scaling.frequencies(self.plain(env), self.base)

    def check(self, env: Env) -> list[Problem]:
        turning, standing = self.turning(env), env.size("coords")
        if not 0 < self.share <= 1:
            return [Problem("share", f"{self.share} is not in (0, 1]")]
        if self.coords not in (1, 2, 3):
            return [Problem("coords", f"{self.coords} is not 1 (text), 2 (image) or 3 (video)")]
        if self.coords != 1 and standing not in (1, self.coords):
            return [
                Problem(
                    "coords", f"{self.coords} coordinates for tokens that stand on {standing}", "use 1, or as many as they have"
                )
            ]
        if turning == 0 or turning % (2 * self.coords):
            what = f"{turning} of {env.size('head')} channels turn, which {self.coords} coordinate(s) cannot share in pairs"
            return [Problem("share", what, f"make head · share a multiple of {2 * self.coords}")]
        return [] if self.scaling is None else self.scaling.check(env)

    @classmethod
    def samples(cls) -> dict[str, list[Any]]:
        return {
            "base": [10000.0, 100.0],
            "share": [1.0, 0.5],
            "pairs": ["half", "adjacent"],
            "coords": [1, 2, 3],
            "when": ["write", "read"],
        }

    def excepts(self, env: Env) -> dict[str, str]:
        if self.scaling is None or not self.scaling.varies:
            return {}
        why = f"{self.scaling.kind}: angles depend on how long the sequence is now"
        return {"chunked": why, "rollback": why}


class RopeModule(PositionModule):
    """q, k (…, n, heads, head) -> like them."""

    part: Rope
    frequency: Tensor
    unstretched: Tensor

    def setup(self) -> None:
        self.turning = self.part.turning(self.env)
        self.key = f"{self.part.key} {self.env.size('pair')}"

    def rotate(self, q: Tensor, at: At) -> Tensor:
        return self.turn(q, at)

    def on_write(self, k: Tensor, at: At) -> Tensor:
        return self.turn(k, at) if self.part.when == "write" else k

    def on_read(self, k: Tensor, at: At) -> Tensor:
        return self.turn(k, at) if self.part.when == "read" else k

    def turn(self, x: Tensor, at: At) -> Tensor:
        """x (…, n, heads, head), each token by its own angle."""
        tables = at.memo.get(self.key)
        if tables is None:
            tables = at.memo[self.key] = self.angles(at, x.dtype)
        cos, sin = tables
        still = None
        if self.turning < x.shape[-1]:
            x, still = x[..., : self.turning], x[..., self.turning :]
        if self.part.pairs == "half":
            a, b = x.chunk(2, -1)
            turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
        else:
            a, b = x[..., 0::2], x[..., 1::2]
            turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
        return turned if still is None else torch.cat([turned, still], -1)

    def angles(self, at: At, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin (…, n, 1, pairs), at least in float32 until the end."""
        frequency = self.frequency.to(wide(dtype))
        scaling = self.part.scaling
        if scaling is not None and scaling.varies:
            plain = self.unstretched.to(frequency)
            frequency = scaling.at_length(plain, self.part.base, lengths(at))[..., None, :]
        if self.part.coords == 1:  # the order itself
            angle = at.order[..., None, None] * frequency
        else:  # text stands alike on each of several coordinates
            coords = at.coords.expand(*at.coords.shape[:-1], self.part.coords)
            angle = (coords[..., None] * frequency).flatten(-2)[..., None, :]
        cos, sin = angle.cos(), angle.sin()
        if scaling is not None:
            cos, sin = cos * scaling.amplitude(), sin * scaling.amplitude()
        return cos.to(dtype), sin.to(dtype)


def lengths(at: At) -> Tensor:
    """(…, n) how long the document of each token is now; in a flat batch a row is one document."""
    last = torch.where(at.real, at.order, 0)
    document = at.seg.clamp_min(0) if at.row is None else at.row
    longest = torch.zeros_like(last).scatter_reduce(-1, document, last, "amax")
    return longest.gather(-1, document) + 1
