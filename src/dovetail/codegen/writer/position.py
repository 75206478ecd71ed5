"""Positions added to the residual stream or to the scores."""

from __future__ import annotations

from dovetail.codegen.code import Call, fill
from dovetail.codegen.registry import Context, PositionCode, writes

LEARNED = '''
class $name(nn.Module):
    """Learned positions: a row per position, added to the embeddings."""

    def __init__(self, length: int, width: int):
        super().__init__()
        self.table = nn.Parameter(torch.randn(length, width) * 0.02)

    def forward(self, x: Tensor) -> Tensor:  # (B, N, D) -> (B, N, D)
        return x + self.table[: x.shape[1]]  #? not offset
        return x + self.table[$offset : $offset + x.shape[1]]  #? offset
'''

SINUSOIDAL = '''
def $name(x: Tensor) -> Tensor:  # (B, N, D) -> (B, N, D)
    """Sinusoidal positions, added to the embeddings: sine and cosine of geometric wavelengths."""
    n, pairs = x.shape[1], x.shape[2] // 2
    pair = torch.arange(pairs, dtype=torch.float64, device=x.device)
    frequency = $base ** -(pair / $steps)
    at = torch.arange(n, device=x.device)[:, None]$offset
    angle = at.to(at_least_fp32(x.dtype)) * frequency.to(at_least_fp32(x.dtype))  # (N, D / 2)
    return x + torch.stack([angle.sin(), angle.cos()], -1).flatten(-2).to(x.dtype)  #? not halves
    return x + torch.cat([angle.sin(), angle.cos()], -1).to(x.dtype)  #? halves
'''

ALIBI = '''
def $name(n: int, heads: int, like: Tensor) -> Tensor:
    """ALiBi: a penalty on scores linear in the distance, one slope per head: (1, H, N, N)."""
    below = 2 ** int(math.log2(heads))  # the largest power of two
    slopes = [2 ** (-8 * (i + 1) / below) for i in range(below)]
    slopes += [2 ** (-4 * (2 * i + 1) / below) for i in range(heads - below)]
    slope = torch.tensor(slopes, dtype=torch.float64, device=like.device)
    slope = slope.to(at_least_fp32(like.dtype))
    at = torch.arange(n, device=like.device)
    distance = (at[:, None] - at).abs().to(slope.dtype)
    return (-distance * slope[:, None, None])[None]
'''

RELATIVE = '''
class $name(nn.Module):
    """T5 bias: a learned number per head and bucket of distance, added to the scores.

    Half of the buckets hold one distance each, the rest grow logarithmically up to distance $max_distance.
    Half of all buckets are for keys that come later.  #? both
    """

    def __init__(self, heads: int):
        super().__init__()
        self.table = nn.Parameter(torch.randn(heads, $buckets) * 0.02)

    def forward(self, n: int) -> Tensor:  # (1, H, N, N)
        at = torch.arange(n, device=self.table.device)
        distance = at[:, None] - at  # (N, N), query minus key
        later = (distance < 0).long() * $count  #? both
        distance = distance.abs()  #? both
        distance = distance.clamp_min(0)  #? not both
        ratio = torch.log(distance.clamp_min(1).float() / $exact) / math.log($max_distance / $exact)
        coarse = ($exact + (ratio * $rest).long()).clamp_max($last)
        bucket = torch.where(distance < $exact, distance, coarse)  #? not both
        bucket = later + torch.where(distance < $exact, distance, coarse)  #? both
        return self.table[:, bucket][None]
'''


@writes("none")
def none(context: Context) -> PositionCode:
    """Nothing anywhere."""
    return PositionCode()


@writes("learned")
def learned(context: Context) -> PositionCode:
    """A table on the stream."""
    part = context.part
    text = fill(LEARNED, {"offset": part.offset}, offset=part.offset)
    name = context.file.define("LearnedPosition", text)
    return PositionCode(Call.to(name, length=context.size("position"), width=context.size("embed")), stream="self.position(x)")


@writes("sinusoidal")
def sinusoidal(context: Context) -> PositionCode:
    """Waves on the stream."""
    context.file.define_at_least_fp32()
    part = context.part
    steps, offset = "(pairs - 1)" if part.endpoint else "pairs", f" + {part.offset}" if part.offset else ""
    text = fill(SINUSOIDAL, {"halves": part.halves}, base=part.base, steps=steps, offset=offset)
    return PositionCode(stream=context.file.define("sinusoidal", text) + "(x)")


@writes("alibi")
def alibi(context: Context) -> PositionCode:
    """A penalty on distance."""
    context.file.define_at_least_fp32()
    return PositionCode(bias=context.file.define("alibi", fill(ALIBI)) + f"(x.shape[1], {context.size('heads')}, x)")


@writes("t5_bias")
def t5_bias(context: Context) -> PositionCode:
    """A learned bias, one table for all layers of a stack or one each."""
    part, both = context.part, context.part.bidirectional
    count = part.buckets // 2 if both else part.buckets
    exact = count // 2
    text = fill(
        RELATIVE,
        {"both": both},
        buckets=part.buckets,
        count=count,
        exact=exact,
        max_distance=part.max_distance,
        rest=count - exact,
        last=count - 1,
    )
    name = context.file.define("RelativeBias", text, "TwoSidedBias" if both else "OneSidedBias")
    module = Call.to(name, heads=context.size("heads"))
    if not part.shared:
        return PositionCode(module, bias="self.position(x.shape[1])")
    # the first layer of the stack has the table; its bias is passed to every layer
    given = {"bias": "self.layers[0].mixer.position(x.shape[1])"}
    return PositionCode(None if context.scope.layer else module, bias="bias", given=given)
