"""Embeddings."""

from __future__ import annotations

from dovetail.codegen.code import Call, fill
from dovetail.codegen.registry import Entry, Here, writes

TOKENS = '''
class $name(nn.Module):
    """A row of the table for each token$more."""

    def __init__(self, vocab: int, width: int):
        super().__init__()
        self.table = nn.Parameter(torch.randn(vocab, width) * 0.02)
        self.type_table = nn.Parameter(torch.randn($types, width) * 0.02)  #? types

    def forward(self, tokens: Tensor) -> Tensor:  # (B, N) -> (B, N, D)  #? not types
    def forward(self, tokens: Tensor, types: Tensor | None) -> Tensor:  # (B, N) -> (B, N, D)  #? types
        types = torch.zeros_like(tokens) if types is None else types  #? types
        x = F.embedding(tokens, self.table)$scale  #? types
        return x + F.embedding(types, self.type_table)  #? types
        return F.embedding(tokens, self.table)$scale  #? not types
'''

SHARED_TYPES = '''
class $name(nn.Module):
    """A row of the decoder's table for each token, and one for its type."""

    def __init__(self, width: int):
        super().__init__()
        self.type_table = nn.Parameter(torch.randn($types, width) * 0.02)

    def forward(self, tokens: Tensor, table: Tensor, types: Tensor | None) -> Tensor:  # (B, N, D)
        types = torch.zeros_like(tokens) if types is None else types
        return F.embedding(tokens, table)$scale + F.embedding(types, self.type_table)
'''

PATCHES = '''
class $name(nn.Module):
    """An image cut into squares, each a linear map of its values$more."""

    def __init__(self, channels: int, patch: int, width: int):
        super().__init__()
        self.patch = patch
        self.project = nn.Linear(channels * patch * patch, width, bias=$bias)
        self.class_token = nn.Parameter(torch.randn(width) * 0.02)  #? class_token

    def forward(self, images: Tensor) -> Tensor:  # (B, channels, height, width) -> (B, N, D)
        images = images.to(self.project.weight.dtype)
        squares = F.unfold(images, self.patch, stride=self.patch).transpose(-1, -2)
        return self.project(squares)  #? not class_token
        x = self.project(squares)  #? class_token
        return torch.cat([self.class_token.expand(x.shape[0], 1, -1), x], -2)  #? class_token
'''


def _scale(here: Here) -> str:
    """What rows of the table are multiplied by."""
    scale = "" if here.part.scale == 1.0 else f" * {here.part.scale}"
    if not here.part.scale_by_width:
        return scale
    root = f"math.sqrt({here.size('embed')})"
    return f" * {root}" if not scale else f" * ({here.part.scale} * {root})"


@writes("tokens")
def tokens(here: Here) -> Entry:
    """Rows of a table, the encoder's perhaps the decoder's own."""
    part, scale = here.part, _scale(here)
    here.file.letter(V="vocabulary")
    inputs = ("tokens: Tensor", *(("types: Tensor | None = None",) if part.types else ()))
    example = f"torch.randint(0, {here.size('vocab')}, (1, 8))"
    sizes = {"vocab": here.size("vocab"), "width": here.size("embed")}
    if part.shared:
        inputs = (inputs[0], "table: Tensor", *inputs[1:])
        if not part.types:
            return Entry(None, inputs, f"F.embedding(tokens, table){scale}", example)
        text = fill(SHARED_TYPES, types=part.types, scale=scale)
        call = Call.to(here.file.define("TypedEmbedding", text), width=sizes["width"])
        return Entry(call, inputs, "self.embed(tokens, table, types)", example)
    more = f", times {scale.removeprefix(' * ')}" if scale else ""
    text = fill(TOKENS, {"types": part.types}, types=part.types, scale=scale, more=more)
    call = Call.to(here.file.define("TokenEmbedding", text), **sizes)
    return Entry(call, inputs, "self.embed(tokens, types)" if part.types else "self.embed(tokens)", example)


@writes("patches")
def patches(here: Here) -> Entry:
    """Squares of an image."""
    part = here.part
    more = ", behind a class token" if part.class_token else ""
    text = fill(PATCHES, {"class_token": part.class_token}, bias=part.bias, more=more)
    sizes = {"channels": part.channels, "patch": part.patch, "width": here.size("embed")}
    example = f"torch.randn(1, {part.channels}, {part.image}, {part.image})"
    return Entry(Call.to(here.file.define("PatchEmbedding", text), **sizes), ("images: Tensor",), "self.embed(images)", example)
