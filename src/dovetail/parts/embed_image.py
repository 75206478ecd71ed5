"""An embedding of two sources: text by a table, patches of images by a matrix, in any order in one sequence.

    x_i = table[id_i]                            id_i < vocab            table (vocab, embed)
    x_i = W · patches[id_i − vocab] + b          id_i ≥ vocab            patches (p, channels, patch, patch) of the Ctx

A token id from the vocabulary's size on is the number of a patch, so that every token names its own source: rows may be padded,
packed, cut and decoded as those of text, and no count of placeholders must agree with a count of patches. With a `prefix` mask
as long as the image, its patches see each other, and the text behind them is causal.

Shapes: ids (…, n) -> x (…, n, embed).             Bavishi et al. 2023 (Fuyu: patches as tokens); Beyer et al. 2024 (PaliGemma)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.core.ctx import Ctx
from dovetail.core.errors import InputError
from dovetail.core.field import bounded
from dovetail.core.group import Embed, EmbedModule
from dovetail.core.layout import TokenLayout
from dovetail.core.linear import Linear
from dovetail.core.part import register
from dovetail.core.scope import Scope
from dovetail.core.weight import Weight

EXAMPLE = 6  # patches of an example; the first four tokens of each row are some of them


@register("tokens_and_patches")
class TokensAndPatches(Embed):
    """Text tokens, and image patches named by ids beyond the vocabulary."""

    TAPS = {"out": "pos channel"}

    patch: int = bounded(16, above=0)
    channels: int = bounded(3, above=0)
    bias: bool = True

    SAMPLES = {"patch": [3, 2], "channels": [3, 1], "bias": [True, False]}

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
            projected = self.project(patches.flatten(1).to(x.dtype))
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
