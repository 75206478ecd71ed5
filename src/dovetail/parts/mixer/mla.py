"""Multi-head latent attention (MLA): keys and values of all heads are projected from one latent per token, and the KV cache
holds only that latent and one rotated key.

    c = norm(x W_c)          k_h = [c W_k,h ; R(x W_r)]          v_h = c W_v,h          q_h = [q'_h ; R(q''_h)]
    z_h = softmax(q_h k_hᵀ·scale, where the mask allows) v_h                             out = z W_o

c is the latent, R the rotation by position; R(x W_r) is one key that all heads share, and the only one with positions.
Queries are projected from x, or from a latent of their own. Two forms of the same result:

    expanded   projects keys and values from the latents, then attends as usual: cheaper for many queries
    absorbed   q'_h (c W_k,h)ᵀ = (q'_h W_k,hᵀ) cᵀ: queries attend to the latents, as to one KV head whose values are its keys,
               and W_v,h is applied afterwards: cheaper for few queries over a long cache

Shapes: x (…, n, embed)   c (…, m, kv_rank)   x W_r (…, m, rope)   q, k (…, n, heads, nope + rope)   v, z (…, n, heads, value).
DeepSeek-AI 2024 (V2, V3). Under tensor parallel latents are whole on every rank, heads are sharded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dovetail.nn.ctx import Ctx
from dovetail.nn.groups import Mask, Norm, Position
from dovetail.nn.layout import TokenLayout
from dovetail.nn.linear import Linear, offers
from dovetail.nn.module import Module
from dovetail.nn.softmax import SoftmaxMixer, SoftmaxMixerProof, SoftmaxModule, check_position
from dovetail.nn.view import KVView
from dovetail.ops.attend import WHOLE, attend
from dovetail.ops.implementation import reference
from dovetail.ops.mask import pairs
from dovetail.spec.field import bounded
from dovetail.spec.part import Part, Problem, child, register
from dovetail.spec.scope import Scope
from dovetail.spec.weight import State, Weight


@register("mla")
class MLA(SoftmaxMixer):
    """Multi-head latent attention: a KV cache of kv_rank + rope values per token, however many heads there are."""

    TAPS = {
        "q": "pos head channel",
        "latent": "pos channel",
        "turned": "pos channel",
        "latents": "key channel",
        "turned_keys": "key channel",
        "pattern": "head query key",
        "z": "pos head channel",
        "out": "pos channel",
    }

    heads: int = bounded(8, above=0, widens=True)
    kv_rank: int = bounded(512, above=0, widens=True)  # size of the latent
    q_rank: int | None = bounded(
        None, above=0, widens=True
    )  # size of the queries' own latent; None: queries are projected from x
    nope: int = bounded(128, above=0)  # channels of a query and key head without position
    rope: int = bounded(64, above=0)  # channels with position
    value: int = bounded(128, above=0)  # channels of a value head
    mask: Mask = child("causal")
    position: Position = child("rope")
    norm: Norm = child("rmsnorm")  # of the latents
    scale: float | None = bounded(None, above=0)  # None: 1/√(nope + rope)
    dropout: float = bounded(0.0, at_least=0, below=1)

    def axes(self, scope: Scope) -> Scope:
        sizes = {"heads": self.heads, "nope": self.nope, "rope": self.rope, "value": self.value, "kv_rank": self.kv_rank}
        if self.q_rank is not None:
            sizes["q_rank"] = self.q_rank
        return scope.add(**sizes, qk_head=self.nope + self.rope)

    def children(self) -> dict[str, Part]:
        norms = {"kv_norm": self.norm} if self.q_rank is None else {"q_norm": self.norm, "kv_norm": self.norm}
        return {"position": self.position, **norms}

    def child_scope(self, scope: Scope, child: str) -> Scope:
        if child != "position":
            return scope.bind(dim="q_rank" if child == "q_norm" else "kv_rank")
        return self.position_scope(scope).add(head=self.rope).bind(dim="head")

    def weights(self, scope: Scope) -> list[Weight]:
        x, latent = ("embed",), ("kv_rank",)
        down = Weight(name="q_down.weight", out=("q_rank",), inp=x, tp="replicate")
        return [
            *([] if self.q_rank is None else [down]),
            Weight(name="q.weight", out=("heads", "qk_head"), inp=x if self.q_rank is None else ("q_rank",)),
            Weight(name="kv_down.weight", out=latent, inp=x, tp="replicate"),
            Weight(name="turned.weight", out=("rope",), inp=x, tp="replicate"),
            Weight(name="k_up.weight", out=("heads", "nope"), inp=latent),
            Weight(name="v_up.weight", out=("heads", "value"), inp=latent),
            Weight(name="o.weight", out=x, inp=("heads", "value")),
            self.head_number(),
        ]

    def state(self, scope: Scope) -> list[State]:
        return self.cached(scope, State(name="latent", axes=("kv_rank",)), State(name="turned", axes=("rope",)))

    def needs(self) -> frozenset[str]:
        return self.position.needs()

    def cost(self, scope: Scope, n: int) -> tuple[int, int]:
        each = 2 * self.heads * (self.nope + self.rope + self.value)
        return each * n * n, each * pairs(self.mask, n)

    def check(self, scope: Scope) -> list[Problem]:
        return check_position(self.position) or self.check_mask(scope)

    def advise(self, scope: Scope, length: int | None) -> list[Problem]:
        expanded, cached = self.heads * (self.nope + self.rope + self.value), self.kv_rank + self.rope
        if cached < expanded:
            return []
        what = f"the cache holds {cached} values per token, no fewer than the {expanded} of all keys and values"
        return [Problem("kv_rank", what, "make it smaller, or use attention")]


class MLAProof(SoftmaxMixerProof, of=MLA):
    """Sampled values and what fields act on."""

    acts_on = {"position": ("q", "turned"), **dict.fromkeys(("mask", "scale"), ("q", "k_up", "turned"))}
    samples = {
        "heads": [6, 4],
        "kv_rank": [10, 5],
        "q_rank": [None, 14],
        "nope": [9, 6],
        "rope": [12, 8],
        "value": [7, 11],
        "scale": [None, 0.4],
        "dropout": [0.0, 0.2],
    }


class MLAModule(SoftmaxModule, of=MLA):
    """x (…, n, embed) -> like x."""

    part: MLA
    q_down: Linear
    q: Linear
    kv_down: Linear
    turned: Linear
    k_up: Linear
    v_up: Linear
    q_norm: Module
    kv_norm: Module

    def setup(self) -> None:
        super().setup()
        part = self.part
        self.qk_head = part.nope + part.rope
        self.scale = self.qk_head**-0.5 if part.scale is None else part.scale
        self.dropout = part.dropout

    def forward(self, x: Tensor, ctx: Ctx, view: KVView = WHOLE) -> Tensor:
        layout = ctx.layout
        latent = ctx.tap(self, "latent", self.kv_norm(self.kv_down(x, ctx), ctx))
        turned = ctx.tap(self, "turned", self.position.on_write(self.turned(x, ctx).unsqueeze(-2), layout).squeeze(-2))
        (latent, turned), key_layout = view.append(layout, latent, turned).entries()
        latent, turned = ctx.tap(self, "latents", latent), ctx.tap(self, "turned_keys", turned)
        turned = self.position.on_read(turned.unsqueeze(-2), key_layout)
        form = self.absorbed if self.absorbing(layout.n, key_layout.n, ctx) else self.expanded
        z = form(self.queries(x, ctx), latent, turned, layout, key_layout, ctx)
        return self.project_out(z, ctx)

    def queries(self, x: Tensor, ctx: Ctx) -> Tensor:
        """(…, n, heads, nope + rope)."""
        if self.part.q_rank is not None:
            x = self.q_norm(self.q_down(x, ctx), ctx)
        q_nope, q_rope = self.q(x, ctx).unflatten(-1, (-1, self.qk_head)).split([self.part.nope, self.part.rope], -1)
        return ctx.tap(self, "q", torch.cat([q_nope, self.position.rotate(q_rope, ctx.layout)], -1))

    def absorbing(self, n: int, m: int, ctx: Ctx) -> bool:
        """Whether n queries over m tokens cost fewer products in the absorbed form; it needs the matrices of k_up and v_up."""
        rank, up = self.part.kv_rank, self.part.nope + self.part.value
        if reference() or not offers("matrix", ctx, self.k_up, self.v_up):
            return False
        return n * (up * rank + m * 2 * rank) < m * (up * rank + n * up)

    def expanded(
        self, q: Tensor, latent: Tensor, turned: Tensor, layout: TokenLayout, key_layout: TokenLayout, ctx: Ctx
    ) -> Tensor:
        """z (…, n, heads, value), with every head's keys and values projected from the latents (…, m, kv_rank)."""
        k = self.k_up(latent, ctx).unflatten(-1, (-1, self.part.nope))
        v = self.v_up(latent, ctx).unflatten(-1, (-1, self.part.value))
        k = torch.cat([k, turned.expand(*k.shape[:-1], -1)], -1)
        return self.attend(q, k, v, layout, key_layout, ctx)

    def absorbed(
        self, q: Tensor, latent: Tensor, turned: Tensor, layout: TokenLayout, key_layout: TokenLayout, ctx: Ctx
    ) -> Tensor:
        """The same z, with W_k applied to the queries and W_v to the attended latents; no key is projected."""
        q_nope, q_rope = q[..., : self.part.nope], q[..., self.part.nope :]
        k_up = self.k_up.matrix(ctx).unflatten(0, (-1, self.part.nope))  # (heads, nope, kv_rank)
        v_up = self.v_up.matrix(ctx).unflatten(0, (-1, self.part.value))  # (heads, value, kv_rank)
        q = torch.cat([torch.einsum("...hi,hir->...hr", q_nope, k_up), q_rope], -1)
        shared = latent.unsqueeze(-2)
        attended = self.attend(q, torch.cat([shared, turned], -1), shared, layout, key_layout, ctx)
        return torch.einsum("...hr,hor->...ho", attended, v_up)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout, key_layout: TokenLayout, ctx: Ctx) -> Tensor:
        """Softmax attention with this part's mask and position."""
        return attend(q, k, v, self.scoring(ctx), layout, key_layout, self.edit(ctx))
