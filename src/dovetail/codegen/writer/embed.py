"""Embeddings."""

from __future__ import annotations

from dovetail.codegen.code import Call, fill
from dovetail.codegen.registry import Context, EmbedCode, writes

TOKENS = '''
class $name(nn.Module):
    """Token embedding: a row of the table per token$more."""

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
    """Token embedding with the decoder's table, plus a type embedding."""

    def __init__(self, width: int):
        super().__init__()
        self.type_table = nn.Parameter(torch.randn($types, width) * 0.02)

    def forward(self, tokens: Tensor, table: Tensor, types: Tensor | None) -> Tensor:  # (B, N, D)
        types = torch.zeros_like(tokens) if types is None else types
        return F.embedding(tokens, table)$scale + F.embedding(types, self.type_table)
'''

PATCHES = '''
class $name(nn.Module):
    """Patch embedding: a linear map of each square of the image$more."""

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


def _scale(context: Context) -> str:
    """What rows of the table are multiplied by."""
    scale = "" if context.part.scale == 1.0 else f" * {context.part.scale}"
    if not context.part.scale_by_width:
        return scale
    root = f"math.sqrt({context.size('embed')})"
    return f" * {root}" if not scale else f" * ({context.part.scale} * {root})"


@writes("tokens")
def tokens(context: Context) -> EmbedCode:
    """Rows of a table, the encoder's perhaps the decoder's own."""
    part, scale = context.part, _scale(context)
    if part.width is not None:
        context.refuse("width", "an embedding that is narrower or wider than the residual stream has no writer yet")
    context.file.letter(V="vocabulary")
    inputs = ("tokens: Tensor", *(("types: Tensor | None = None",) if part.types else ()))
    example = f"torch.randint(0, {context.size('vocab')}, (1, 8))"
    sizes = {"vocab": context.size("vocab"), "width": context.size("embed")}
    if part.shared:
        inputs = (inputs[0], "table: Tensor", *inputs[1:])
        if not part.types:
            return EmbedCode(None, inputs, f"F.embedding(tokens, table){scale}", example)
        text = fill(SHARED_TYPES, types=part.types, scale=scale)
        call = Call.to(context.file.define("TypedEmbedding", text), width=sizes["width"])
        return EmbedCode(call, inputs, "self.embed(tokens, table, types)", example)
    more = f", times {scale.removeprefix(' * ')}" if scale else ""
    text = fill(TOKENS, {"types": part.types}, types=part.types, scale=scale, more=more)
    call = Call.to(context.file.define("TokenEmbedding", text), **sizes)
    return EmbedCode(call, inputs, "self.embed(tokens, types)" if part.types else "self.embed(tokens)", example)


@writes("patches")
def patches(context: Context) -> EmbedCode:
    """Squares of an image."""
    part = context.part
    more = ", after a class token" if part.class_token else ""
    text = fill(PATCHES, {"class_token": part.class_token}, bias=part.bias, more=more)
    sizes = {"channels": part.channels, "patch": part.patch, "width": context.size("embed")}
    example = f"torch.randn(1, {part.channels}, {part.image}, {part.image})"
    return EmbedCode(
        Call.to(context.file.define("PatchEmbedding", text), **sizes), ("images: Tensor",), "self.embed(images)", example
    )
