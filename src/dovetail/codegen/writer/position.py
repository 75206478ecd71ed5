"""Positions on the stream, and those that add to the scores."""

from __future__ import annotations

from dovetail.codegen.code import Call, fill
from dovetail.codegen.registry import Here, Placed, writes
from dovetail.codegen.writer.precision import define_at_least_fp32

LEARNED = '''
class $name(nn.Module):
    """A trainable row for each position, added to the stream."""

    def __init__(self, length: int, width: int):
        super().__init__()
        self.table = nn.Parameter(torch.randn(length, width) * 0.02)

    def forward(self, x: Tensor) -> Tensor:  # (B, N, D) -> (B, N, D)
        return x + self.table[: x.shape[1]]  #? not offset
        return x + self.table[$offset : $offset + x.shape[1]]  #? offset
'''

SINUSOIDAL = '''
def $name(x: Tensor) -> Tensor:  # (B, N, D) -> (B, N, D)
    """Adds waves of geometric wavelengths to the stream, a sine and a cosine for each."""
    n, pairs = x.shape[1], x.shape[2] // 2
    frequency = $base ** -(torch.arange(pairs, dtype=torch.float64, device=x.device) / pairs)
    at = torch.arange(n, device=x.device)[:, None]
    angle = at.to(wide(x.dtype)) * frequency.to(wide(x.dtype))  # (N, D / 2)
    return x + torch.stack([angle.sin(), angle.cos()], -1).flatten(-2).to(x.dtype)
'''

ALIBI = '''
def $name(n: int, heads: int, like: Tensor) -> Tensor:
    """A penalty on scores that grows with distance, each head by its own slope: (1, H, N, N)."""
    below = 2 ** int(math.log2(heads))  # the power of two at or below
    slopes = [2 ** (-8 * (i + 1) / below) for i in range(below)]
    slopes += [2 ** (-4 * (2 * i + 1) / below) for i in range(heads - below)]
    slope = torch.tensor(slopes, dtype=torch.float64, device=like.device).to(wide(like.dtype))
    at = torch.arange(n, device=like.device)
    distance = (at[:, None] - at).abs().to(slope.dtype)
    return (-distance * slope[:, None, None])[None]
'''

RELATIVE = '''
class $name(nn.Module):
    """A learned number for each head and bucket of distance, added to the scores.

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
def none(here: Here) -> Placed:
    """Nothing anywhere."""
    return Placed()


@writes("learned")
def learned(here: Here) -> Placed:
    """A table on the stream."""
    part = here.part
    text = fill(LEARNED, {"offset": part.offset}, offset=part.offset)
    name = here.file.define("LearnedPosition", text)
    return Placed(Call.to(name, length=here.size("position"), width=here.size("embed")), stream="self.position(x)")


@writes("sinusoidal")
def sinusoidal(here: Here) -> Placed:
    """Waves on the stream."""
    define_at_least_fp32(here.file)
    return Placed(stream=here.file.define("sinusoidal", fill(SINUSOIDAL, base=here.part.base)) + "(x)")


@writes("alibi")
def alibi(here: Here) -> Placed:
    """A penalty on distance."""
    define_at_least_fp32(here.file)
    return Placed(bias=here.file.define("alibi", fill(ALIBI)) + f"(x.shape[1], {here.size('heads')}, x)")


@writes("t5_bias")
def t5_bias(here: Here) -> Placed:
    """A learned bias, one table for all layers of a stack or one each."""
    part, both = here.part, here.part.bidirectional
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
    name = here.file.define("RelativeBias", text, "TwoSidedBias" if both else "OneSidedBias")
    module = Call.to(name, heads=here.size("heads"))
    if not part.shared:
        return Placed(module, bias="self.position(x.shape[1])")
    # the first layer of the stack holds the table; what it gives is handed to every layer
    given = {"bias": "self.layers[0].mixer.position(x.shape[1])"}
    return Placed(None if here.scope.layer else module, bias="bias", given=given)
