"""Embeddings: from inputs to the residual stream.

tokens    x_i = table[token_i] · scale (+ types[type_i])                   token ids (…, n) -> x (…, n, embed)
          with a `width` of its own: x (…, n, table), and W x + b behind positions, norm and dropout (ELECTRA, 2020)
patches   a linear projection of each patch of an image, after a class token (Dosovitskiy et al. 2020)
          images (batch, channels, height, width) -> x (batch, 1 + patches, embed); 224² in patches of 16²: 196 patches

An embedding of two sources: text by a table, patches of images by a matrix, in any order in one sequence.

    x_i = table[id_i]                            id_i < vocab            table (vocab, embed)
    x_i = W · patches[id_i − vocab] + b          id_i ≥ vocab            patches (p, channels, patch, patch) of the Ctx

A token id from the vocabulary's size on is the number of a patch, so that every token names its own source: rows may be padded,
packed, cut and decoded as those of text, and no count of placeholders must agree with a count of patches. With a `prefix` mask
as long as the image, its patches see each other, and the text behind them is causal.

Shapes: ids (…, n) -> x (…, n, embed).             Bavishi et al. 2023 (Fuyu: patches as tokens); Beyer et al. 2024 (PaliGemma)
"""

from __future__ import annotations

from math import sqrt
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.base.errors import InputError
from dovetail.nn.ctx import Ctx
from dovetail.nn.groups import Embed, EmbedModule
from dovetail.nn.layout import TokenLayout
from dovetail.nn.linear import Linear, dtype_of
from dovetail.ops.vocab import lookup
from dovetail.spec.field import MAX_FACTOR, bounded
from dovetail.spec.part import Problem, broken, register
from dovetail.spec.part_proof import FieldCause, Proof
from dovetail.spec.scope import Scope
from dovetail.spec.weight import Weight

VOCAB = ("vocab",)


@register("tokens")
class Tokens(Embed):
    """Token embedding: one row of the table per token id."""

    token_ids = True
    tp_axes = VOCAB
    TAPS = {"out": "pos channel"}

    scale: float = bounded(1.0, above=0, at_most=MAX_FACTOR)
    scale_by_width: bool = False  # multiplies by √width (Vaswani et al. 2017, Gemma)
    types: int = bounded(0, at_least=0)  # rows of the token type table (BERT's segments)
    shared: bool = False  # an encoder that uses its decoder's table
    width: int | None = bounded(
        None, above=0, widens=True
    )  # of the table, where it is projected to the residual stream; None: the same

    def axes(self, scope: Scope) -> Scope:
        return scope.add(types=self.types)

    def table_width(self) -> int | None:
        return self.width

    def weights(self, scope: Scope) -> list[Weight]:
        same, width = "embed.table" if self.shared else None, ("embed",) if self.width is None else ("table",)
        project = [
            Weight(name="project.weight", out=("embed",), inp=width),
            Weight(name="project.bias", out=("embed",), init="zeros", role="bias"),
        ]
        return [
            Weight(name="table", out=("vocab",), inp=width, role="embed", same_as=same),
            *([Weight(name="type_table", out=("types",), inp=width, role="embed")] if self.types else []),
            *([] if self.width is None else project),
        ]

    def check(self, scope: Scope) -> list[Problem]:
        own, wide = "a decoder's embedding has no other table to share", "a shared table has the width of its decoder's"
        return broken(
            (self.shared and scope.path == "embed", "shared", own, "set it on the encoder's embedding"),
            (self.shared and self.width is not None, "width", wide, "leave it null, or set shared: false"),
        )[:1]

    def example(self, scope: Scope, batch: int, n: int, generator: torch.Generator) -> Tensor:
        return torch.randint(0, scope.size("vocab"), (batch, n), generator=generator)


class TokensProof(Proof, of=Tokens):
    """Sampled values and causes."""

    causes = {
        "scale": FieldCause("embedding scale", (1.0,)),
        "scale_by_width": FieldCause("embedding scale", (1.0,)),
        "types": FieldCause("token types missing"),
    }
    samples = {
        "scale": [1.0, 2.0],
        "scale_by_width": [False, True],
        "shared": [False, True],
        "types": [0, 2],
        "width": [None, 10],
    }


class TokensModule(EmbedModule, of=Tokens):
    """tokens (…, n) -> x (…, n, embed)."""

    part: Tokens
    table: Tensor
    type_table: Tensor
    project: Linear

    def setup(self) -> None:
        width = self.part.width or self.scope.size("embed")
        self.scale = self.part.scale * (sqrt(width) if self.part.scale_by_width else 1.0)
        self.vocab = self.scope.size("vocab")

    def forward(self, inputs: Tensor, ctx: Ctx) -> tuple[Tensor, TokenLayout]:
        self.check_ids(inputs, self.vocab, "token id", "vocabulary")
        sharded = ctx.ranks.axes is not None and ctx.ranks.sharded(VOCAB)
        x = lookup(inputs, self.table, self, ctx, VOCAB) if sharded else F.embedding(inputs, self.table)
        if self.scale != 1.0:
            x = x * self.scale
        if self.part.types:
            types = torch.zeros_like(inputs) if ctx.types is None else ctx.types
            self.check_ids(types, self.part.types, "token type", "table")
            x = x + F.embedding(types, self.type_table)
        return x if ctx.taps is None else ctx.tap(self, "out", x), ctx.layout

    def widen(self, x: Tensor, ctx: Ctx | None = None) -> Tensor:
        return x if self.part.width is None else self.project(x, ctx)

    def check_ids(self, ids: Tensor, rows: int, what: str, table: str) -> None:
        """Raise InputError where an id has no row in its table. On CPU and outside compiled graphs alone: reading the ids
        would wait for a GPU, and break a graph."""
        if torch.compiler.is_compiling() or ids.device.type != "cpu" or not ids.numel():
            return
        low, high = map(int, torch.aminmax(ids))
        if low < 0 or high >= rows:
            bad = low if low < 0 else high
            raise InputError(f"{self.path}: {what} {bad} is outside the {table} of {rows}; ids are 0 to {rows - 1}")


@register("patches")
class Patches(Embed):
    """Patch embedding of images (ViT), with a class token."""

    TAPS = {"out": "pos channel"}
    coords: ClassVar[int] = 2

    image: int = bounded(224, above=0)
    patch: int = bounded(16, above=0)
    channels: int = bounded(3, above=0)
    class_token: bool = True
    bias: bool = True

    def side(self) -> int:
        """Patches per side."""
        return self.image // self.patch

    def tokens(self) -> int:
        """Tokens per image."""
        return self.side() ** 2 + self.class_token

    def axes(self, scope: Scope) -> Scope:
        return scope.add(patch_values=self.channels * self.patch**2)

    def weights(self, scope: Scope) -> list[Weight]:
        return [
            Weight(name="project.weight", out=("embed",), inp=("patch_values",)),
            *([Weight(name="project.bias", out=("embed",), init="zeros", role="bias")] if self.bias else []),
            *([Weight(name="class_token", out=("embed",), role="embed")] if self.class_token else []),
        ]

    def check(self, scope: Scope) -> list[Problem]:
        if self.image % self.patch:
            return [Problem("patch", f"patches of {self.patch} do not tile an image of {self.image}")]
        return []

    def example(self, scope: Scope, batch: int, n: int, generator: torch.Generator) -> Tensor:
        shape = (batch, self.channels, self.image, self.image)
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def causal(self) -> bool:
        return False


class PatchesProof(Proof, of=Patches):
    """Sampled values."""

    samples = {"image": [12, 18], "patch": [3, 6], "channels": [3, 1], "class_token": [True, False], "bias": [True, False]}


class PatchesModule(EmbedModule, of=Patches):
    """images (batch, channels, height, width) -> x (batch, n, embed)."""

    part: Patches
    project: Linear
    class_token: Tensor

    def forward(self, inputs: Tensor, ctx: Ctx) -> tuple[Tensor, TokenLayout]:
        size, side = self.part.patch, self.part.side()
        patches = F.unfold(inputs.to(dtype_of(self.project)), size, stride=size).transpose(-1, -2)
        x = self.project(patches, ctx)
        rows = torch.arange(side, device=x.device)
        coords = torch.stack(torch.meshgrid(rows, rows, indexing="ij"), -1).flatten(0, 1)
        if self.part.class_token:  # at coordinates (0, 0), as the first patch; its order differs
            x = torch.cat([self.class_token.expand(x.shape[0], 1, -1), x], -2)
            coords = torch.cat([torch.zeros_like(coords[:1]), coords])
        order = torch.arange(x.shape[-2], device=x.device).expand(x.shape[:-1])
        sample = ctx.layout.sample.amin() + torch.arange(x.shape[0], device=x.device)[:, None].expand(order.shape)
        layout = TokenLayout(coords.expand(x.shape[0], -1, -1), order, torch.zeros_like(order), start=0, sample=sample)
        return ctx.tap(self, "out", x), layout


EXAMPLE = 6  # patches of an example; the first four tokens of each row are some of them


@register("tokens_and_patches")
class TokensAndPatches(Embed):
    """Text tokens, and image patches named by ids beyond the vocabulary."""

    TAPS = {"out": "pos channel"}

    patch: int = bounded(16, above=0)
    channels: int = bounded(3, above=0)
    bias: bool = True

    def axes(self, scope: Scope) -> Scope:
        return scope.add(patch_values=self.channels * self.patch**2)

    def weights(self, scope: Scope) -> list[Weight]:
        declared = [
            Weight(name="table", out=("vocab",), inp=("embed",), role="embed"),
            Weight(name="project.weight", out=("embed",), inp=("patch_values",)),
        ]
        return [*declared, Weight(name="project.bias", out=("embed",), init="zeros", role="bias")] if self.bias else declared

    def example(self, scope: Scope, batch: int, n: int, generator: torch.Generator) -> Tensor:
        ids = torch.randint(0, scope.size("vocab"), (batch, n), generator=generator)
        image = torch.randint(0, EXAMPLE, ids[:, :4].shape, generator=generator)
        return torch.cat([scope.size("vocab") + image, ids[:, 4:]], -1)

    def example_patches(self, scope: Scope, generator: torch.Generator) -> Tensor:
        return torch.randn(EXAMPLE, self.channels, self.patch, self.patch, generator=generator, dtype=torch.float64)


class TokensAndPatchesProof(Proof, of=TokensAndPatches):
    """Sampled values."""

    samples = {"patch": [3, 2], "channels": [3, 1], "bias": [True, False]}


class TokensAndPatchesModule(EmbedModule, of=TokensAndPatches):
    """ids (…, n) -> x (…, n, embed)."""

    part: TokensAndPatches
    table: Tensor
    project: Linear

    def setup(self) -> None:
        self.vocab = self.scope.size("vocab")
        self.shape = (self.part.channels, self.part.patch, self.part.patch)

    def forward(self, inputs: Tensor, ctx: Ctx) -> tuple[Tensor, TokenLayout]:
        patches = ctx.patches
        if patches is None:  # of a Ctx without images: none, so that a patch's id is past the end
            patches = self.table.new_zeros(0, *self.shape)
        if patches.shape[1:] != self.shape:
            wanted = ", ".join(map(str, self.shape))
            raise InputError(f"{self.path}: patches have the shape {tuple(patches.shape)}; give (patches, {wanted})")
        self.check_ids(inputs, len(patches))
        image = inputs >= self.vocab
        x = F.embedding(torch.where(image, 0, inputs), self.table)
        if len(patches):
            projected = self.project(patches.flatten(1).to(x.dtype), ctx)
            x = torch.where(image[..., None], F.embedding(torch.where(image, inputs - self.vocab, 0), projected), x)
        return ctx.tap(self, "out", x), ctx.layout

    def check_ids(self, ids: Tensor, patches: int) -> None:
        """Raise InputError where an id is neither a token nor a patch. On CPU and outside compiled graphs alone: reading the
        ids would wait for a GPU, and break a graph."""
        if torch.compiler.is_compiling() or ids.device.type != "cpu" or not ids.numel():
            return
        low, high = (int(bound) for bound in torch.aminmax(ids))
        if low < 0 or high >= self.vocab + patches:
            ranges = f"tokens are 0 to {self.vocab - 1}, and {self.vocab} on are the {patches} patches of the Ctx"
            raise InputError(f"{self.path}: token id {low if low < 0 else high} is neither a token nor a patch; {ranges}")
