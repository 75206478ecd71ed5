"""Gated linear attention: a matrix memory a head, in which every key channel fades by as much as the token says.

    q, k, v = x W_q, x W_k, x W_v          a = σ(x W_d W_u + b)^{1/τ}          S_t = diag(a_t) S_{t−1} + k_t v_tᵀ
    y_t = S_tᵀ q_t / √key                  out = (norm(y) ∘ silu(x W_g)) W_o

W_d W_u is of low rank. The root of degree τ keeps a close to 1, so that a memory lasts. The norm is over each head alone.

Shapes: x (rows, n, embed)   q, k, a (rows, n, heads, key)   v, y (rows, n, heads, value)   S (rows, heads, key, value).
Yang et al. 2024.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from dovetail.core.ctx import Ctx
from dovetail.core.env import Env
from dovetail.core.group import Norm
from dovetail.core.line import Line
from dovetail.core.module import Linear, Module, wide
from dovetail.core.part import Problem, child, register
from dovetail.core.recur import Carry, Recurrent, RecurrentModule
from dovetail.core.weight import State, Weight
from dovetail.ops.scan.gated import gated_flops, gated_scan


@register("gated_linear")
class GatedLinear(Recurrent):
    """Linear attention whose memory fades channel by channel."""

    TAPS = ("q", "k", "v", "fade", "y", "out")

    heads: int = 4
    key_size: int | None = None  # None: width / heads / 2
    value_size: int | None = None  # None: width / heads
    rank: int = 16  # of the gate that says what fades
    slowness: float = 16.0  # τ: the larger, the longer a memory lasts
    norm: Norm = child("rms")

    def module(self) -> type[Module]:
        return GatedLinearModule

    def axes(self, env: Env) -> Env:
        each = env.size("embed") // max(self.heads, 1)
        return env.add(heads=self.heads, key=self.key_size or each // 2, value=self.value_size or each, rank=self.rank)

    def scope(self, env: Env, child: str) -> Env:
        return env.bind(dim="value")

    def weights(self, env: Env) -> list[Weight]:
        stream, keys, values = ("embed",), ("heads", "key"), ("heads", "value")
        made = {"q": keys, "k": keys, "v": values, "gate": values}
        declared = [Weight(name=f"{name}.weight", out=out, inp=stream) for name, out in made.items()]
        declared += [Weight(name="fade_down.weight", out=("rank",), inp=stream, tp="replicate")]  # all heads fade by all of it
        declared += [Weight(name="fade_up.weight", out=keys, inp=("rank",))]
        declared += [Weight(name="fade_up.bias", out=keys, init="zeros", role="bias")]
        return [*declared, Weight(name="o.weight", out=stream, inp=values)]

    def state(self, env: Env) -> list[State]:
        memory = State(name="memory", axes=("heads", "key", "value"), per="sequence", wide=True)
        return [memory] if env.decodes else []

    def cost(self, env: Env, n: int) -> tuple[int, int]:
        flops = gated_flops(n, env.size("heads"), env.size("key"), env.size("value"))
        return flops, flops

    def check(self, env: Env) -> list[Problem]:
        for name, value in (
            ("heads", self.heads),
            ("key_size", self.key_size),
            ("value_size", self.value_size),
            ("rank", self.rank),
        ):
            if value is not None and value < 1:
                return [Problem(name, f"{value} is not above 0")]
        found: list[Problem] = []
        if self.slowness <= 0:
            found.append(Problem("slowness", f"{self.slowness} is not above 0", "use 1 for a gate as it is"))
        width = env.size("embed")
        for name, value, parts in (("key_size", self.key_size, 2 * self.heads), ("value_size", self.value_size, self.heads)):
            if value is None and width % parts:
                found.append(Problem("heads", f"the width, {width}, cannot be cut in {parts} for `{name}`", f"set `{name}`"))
        return found

    def region(self) -> bool:
        return True

    @classmethod
    def samples(cls) -> dict[str, list[Any]]:
        return {"heads": [2, 4], "key_size": [5, None], "value_size": [6, None], "rank": [3, 8], "slowness": [16.0, 1.5]}


class GatedLinearModule(RecurrentModule):
    """x (rows, n, embed) -> like x."""

    part: GatedLinear
    q: Linear
    k: Linear
    v: Linear
    gate: Linear
    fade_down: Linear
    fade_up: Linear
    o: Linear
    norm: Module

    def setup(self) -> None:
        self.key, self.value = self.env.size("key"), self.env.size("value")
        self.scale = self.key**-0.5

    def recur(self, x: Tensor, line: Line, ctx: Ctx, carry: Carry | None) -> tuple[Tensor, Carry]:
        q = ctx.tap(self, "q", self.q(x).unflatten(-1, (-1, self.key)))
        k = ctx.tap(self, "k", self.k(x).unflatten(-1, (-1, self.key)))
        v = ctx.tap(self, "v", self.v(x).unflatten(-1, (-1, self.value)))
        fade = self.fade_up(self.fade_down(x)).to(wide(x.dtype)).unflatten(-1, (-1, self.key))
        fade = ctx.tap(self, "fade", F.logsigmoid(fade) / self.part.slowness)  # log a, at most 0
        y, memory = gated_scan(q * self.scale, k, v, fade, line, None if carry is None else carry[0])
        y = self.norm(ctx.tap(self, "y", y), ctx).flatten(-2) * F.silu(self.gate(x))
        return ctx.tap(self, "out", self.o(y)), (memory,)
