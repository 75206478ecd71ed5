"""Linformer: keys and values of a document are projected along the sequence to `rank` of them, so attention costs n·rank.

    k̃_r = Σ_j E_jr k_j          ṽ_r = Σ_j F_jr v_j          z = softmax(q k̃ᵀ/√head) ṽ          E, F (length, rank)

j is a token's position in its document. Every output depends on every token of the document, later ones too: for encoders.
Each document of a packed row is projected by itself. A document has at most `length` tokens.

Shapes: x (…, n, embed)   q, z (…, n, heads, head)   k̃, ṽ (…, documents · rank, heads, head).            Wang et al. 2020
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.base.errors import StateError
from dovetail.nn.ctx import Ctx
from dovetail.nn.groups import Mask
from dovetail.nn.layout import TokenLayout
from dovetail.nn.linear import Linear
from dovetail.nn.softmax import SoftmaxMixer, SoftmaxMixerProof, SoftmaxModule, check_heads, head_size
from dovetail.nn.view import KVView
from dovetail.ops.attend import WHOLE, attend
from dovetail.spec.field import bounded
from dovetail.spec.part import KINDS, Part, Problem, register
from dovetail.spec.scope import Scope
from dovetail.spec.weight import Weight


@register("linformer")
class Linformer(SoftmaxMixer):
    """Bidirectional attention of low rank."""

    TAPS = {
        "q": "pos head channel",
        "k": "pos head channel",
        "v": "pos head channel",
        "mixed_k": "mixed head channel",
        "mixed_v": "mixed head channel",
        "z": "pos head channel",
        "out": "pos channel",
    }

    heads: int = bounded(8, above=0, widens=True)
    head: int | None = bounded(None, above=0)  # None: width / heads
    rank: int = bounded(256, above=0)
    length: int = bounded(4096, above=0)  # the most tokens of a document

    def axes(self, scope: Scope) -> Scope:
        head = head_size(self.heads, self.head, scope)
        return scope.add(heads=self.heads, head=head, rank=self.rank, position=self.length)

    def children(self) -> dict[str, Part]:
        return {}

    def weights(self, scope: Scope) -> list[Weight]:
        x, inner = ("embed",), ("heads", "head")
        tables = ("k_map", "v_map")  # one row per position, the same for all heads
        return [
            *(Weight(name=f"{name}.weight", out=inner, inp=x) for name in ("q", "k", "v")),
            *(Weight(name=name, out=("position",), inp=("rank",), role="embed", tp="replicate") for name in tables),
            Weight(name="o.weight", out=x, inp=inner),
            self.head_number(),
        ]

    def visibility(self) -> Mask:
        full: Any = KINDS["full"]
        return full()

    def cost(self, scope: Scope, n: int) -> tuple[int, int]:
        flops = 8 * n * self.rank * scope.size("heads", "head")  # project k and v, score, sum
        return flops, flops

    def check(self, scope: Scope) -> list[Problem]:
        return check_heads(self.heads, self.heads, self.head, scope)

    def advise(self, scope: Scope, length: int | None) -> list[Problem]:
        if length is None:
            return []
        if length > self.length:
            what = f"{length} tokens are more than the {self.length} rows of the tables"
            return [Problem("length", what, "raise it, or use attention")]
        if length <= self.rank:
            what = f"{length} tokens are projected to {self.rank}, which are not fewer"
            return [Problem("rank", what, "lower it, or use attention")]
        return []


class LinformerProof(SoftmaxMixerProof, of=Linformer):
    """Sampled values."""

    samples = {"heads": [6, 4], "head": [12], "rank": [3, 5], "length": [45, 50]}


class LinformerModule(SoftmaxModule, of=Linformer):
    """x (…, n, embed) -> like x."""

    part: Linformer
    q: Linear
    k: Linear
    v: Linear
    k_map: Tensor
    v_map: Tensor

    def setup(self) -> None:
        super().setup()
        self.size = self.scope.size("head")
        self.scale = self.size**-0.5

    def forward(self, x: Tensor, ctx: Ctx, view: KVView = WHOLE) -> Tensor:
        q, k, v = (project(x, ctx).unflatten(-1, (-1, self.size)) for project in (self.q, self.k, self.v))
        q, k, v = ctx.tap(self, "q", q), ctx.tap(self, "k", k), ctx.tap(self, "v", v)
        (k, v), key_layout = view.append(ctx.layout, k, v).entries()
        key_layout.once(f"fits {self.part.length}", lambda: self.check_length(key_layout))
        documents = key_layout.once(documents_of, lambda: documents_of(key_layout))
        mixed_layout = key_layout.once(("mixed", self.part.rank), lambda: self.places(key_layout, documents))
        k = ctx.tap(self, "mixed_k", self.mixed(k, self.k_map, key_layout, documents))
        v = ctx.tap(self, "mixed_v", self.mixed(v, self.v_map, key_layout, documents))
        return self.project_out(attend(q, k, v, self.scoring(ctx), ctx.layout, mixed_layout, self.edit(ctx)), ctx)

    def mixed(self, x: Tensor, table: Tensor, layout: TokenLayout, documents: int) -> Tensor:
        """(…, documents · rank, heads, head) from (…, m, heads, head)."""
        coefficients = F.embedding(layout.order, table)  # (…, m, rank)
        if layout.start is None:  # zero for other documents and for padding
            document = layout.seg if layout.row is None else layout.row
            own = document[..., None] == torch.arange(documents, device=x.device)
            coefficients = (own[..., None] * coefficients.unsqueeze(-2)).flatten(-2)
        return (coefficients.transpose(-1, -2) @ x.flatten(-2)).unflatten(-1, x.shape[-2:])

    def places(self, layout: TokenLayout, documents: int) -> TokenLayout:
        """The layout of the projected keys: `rank` of them per document."""
        device, rank = layout.order.device, self.part.rank
        if layout.start is not None:
            return TokenLayout.whole(layout.order.shape[0], rank, device)
        document = torch.arange(documents, device=device).repeat_interleave(rank)
        order = torch.arange(rank, device=device).repeat(documents)
        if layout.row is not None:
            return TokenLayout.of(order, torch.zeros_like(order), document)
        return TokenLayout.of(order.expand(*layout.order.shape[:-1], -1), document.expand(*layout.order.shape[:-1], -1))

    def check_length(self, layout: TokenLayout) -> bool:
        """Raise where a token's position is past the tables, as far as that is known without waiting for a device."""
        longest = layout.end
        if longest is not None and longest > self.part.length:
            raise StateError(
                f"{self.path}: position {longest - 1} is past the last row of the tables, {self.part.length - 1};"
                " shorten the sequence, or give `linformer` a larger length"
            )
        return True


def documents_of(layout: TokenLayout) -> int:
    """The largest number of documents in a row; in a flat batch, the number of rows."""
    return max(layout.documents) if layout.row is None else layout.rows
