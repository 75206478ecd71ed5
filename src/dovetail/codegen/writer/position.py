"""Positions: added to the residual stream or to the scores, or rotary (RoPE), a function that rotates q and k; and stretched
frequencies: lines that change `frequency`, of shape (pairs,)."""

from __future__ import annotations

from dovetail.codegen.code import STEP, WIDTH, Call, fill
from dovetail.codegen.registry import Context, PositionCode, ScalingCode, writes

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


NTK = """
    base = base * $factor ** (2 * pairs / (2 * pairs - 2))  # a larger base stretches slow pairs most
    frequency = base**-steps
"""

DYNAMIC = """
    # a larger base, by how much longer the text is than the $original tokens trained on
    acc = at_least_fp32(x.dtype)
    over = torch.full(x.shape[:2], max(n, $original), device=x.device).to(acc) / $original  # per token
    grown = $factor * over - ($factor - 1)
    steps = torch.arange(pairs, dtype=acc, device=x.device) / pairs
    frequency = (base * grown ** (2 * pairs / (2 * pairs - 2)))[..., None, None] ** -steps
"""

YARN = """
    # fast pairs are kept, slow ones divided by $factor, with a ramp between
    low, high = (
        2 * pairs * math.log($original / (turns * 2 * math.pi)) / (2 * math.log(base))
        for turns in ($fast, $slow)
    )
    low, high = math.floor(low), math.ceil(high)  #? truncate
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    at = torch.arange(pairs, dtype=torch.float64, device=x.device)
    ramp = ((at - low) / (high - low or 0.001)).clamp(0, 1)
    frequency = frequency * (1 - ramp) + frequency / $factor * ramp
"""

LLAMA3 = """
    # pairs that turn often within $original tokens are kept, the slowest divided by $factor
    turns = $original * frequency / (2 * math.pi)
    smooth = ((turns - $lowest) / ($highest - $lowest)).clamp(0, 1)
    frequency = (1 - smooth) * frequency / $factor + smooth * frequency
"""

LONGROPE = """
    # a factor for each pair: one list up to $original tokens, another beyond
    $short
    $long
    factors = torch.tensor(long if n > $original else short, dtype=at_least_fp32(x.dtype), device=x.device)
    frequency = frequency.to(at_least_fp32(x.dtype)) / factors
"""


@writes("linear_scaling")
def linear(context: Context) -> ScalingCode:
    """All frequencies divided."""
    return ScalingCode(f"    frequency = frequency / {context.part.factor}  # positions interpolated")


@writes("ntk")
def ntk(context: Context) -> ScalingCode:
    """A larger base."""
    return ScalingCode(fill(NTK, factor=context.part.factor))


@writes("dynamic_ntk")
def dynamic_ntk(context: Context) -> ScalingCode:
    """A larger base, by the length."""
    return ScalingCode(fill(DYNAMIC, factor=context.part.factor, original=context.part.original))


@writes("yarn")
def yarn(context: Context) -> ScalingCode:
    """A ramp between kept and divided frequencies."""
    part = context.part
    placeholders = {"factor": part.factor, "original": part.original, "fast": part.beta_fast, "slow": part.beta_slow}
    return ScalingCode(fill(YARN, {"truncate": part.truncate}, **placeholders), part.amplitude())


@writes("llama3")
def llama3(context: Context) -> ScalingCode:
    """By wavelength."""
    part = context.part
    return ScalingCode(fill(LLAMA3, factor=part.factor, original=part.original, lowest=part.low, highest=part.high))


@writes("longrope")
def longrope(context: Context) -> ScalingCode:
    """A factor for each pair, by the length."""
    part = context.part
    lists = {name: _listed(name, getattr(part, name)) for name in ("short", "long")}
    return ScalingCode(fill(LONGROPE, None, original=part.original, **lists), part.amplitude())


@writes("proportional")
def proportional(context: Context) -> ScalingCode:
    """The first pairs turn, the others stay."""
    part = context.part
    lines = f"    frequency[int({part.fraction} * (2 * pairs) // 2) :] = 0.0  # only the first pairs turn"
    return ScalingCode(lines if part.factor == 1.0 else f"{lines}\n    frequency = frequency / {part.factor}")


def _listed(name: str, numbers: tuple[float, ...]) -> str:
    """`name = [...]` within the width."""
    one = f"{name} = [{', '.join(map(repr, numbers))}]"
    if STEP + len(one) <= WIDTH:
        return one
    rows = "\n".join(f"{' ' * 2 * STEP}{number!r}," for number in numbers)
    return f"{name} = [\n{rows}\n{' ' * STEP}]"


ROTATE = '''
def $name(x: Tensor, base: float) -> Tensor:  # (B, N, heads, K) -> the same
    """RoPE: channel pair i of token p is rotated by the angle p * base^(-i / pairs).

    Pair i is the channels i and i + $rotary_dim/2, so a score depends on the distance alone.  #? half
    Pair i is the channels 2i and 2i + 1, so a score depends on the distance alone.  #? not half
    """
    x, unrotated = x[..., :$rotary_dim], x[..., $rotary_dim:]  # only the first channels rotate  #? partial
    n, pairs = x.shape[1], x.shape[-1] // $two
    steps = torch.arange(pairs, dtype=torch.float64, device=x.device) / pairs
    frequency = base**-steps  # (pairs,)
$stretch  #? stretch
    frequency = frequency.repeat($coords)  # once for each coordinate  #? coords
    angle = torch.arange(n, device=x.device)[:, None, None] * frequency.to(at_least_fp32(x.dtype))
    cos, sin = angle.cos(), angle.sin()  # (N, 1, $pairs)
    cos, sin = cos * $amplitude, sin * $amplitude  # attention factor  #? amplitude
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    a, b = x.chunk(2, -1)  #? half
    a, b = x[..., 0::2], x[..., 1::2]  #? not half
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)  #? half not partial
    return torch.cat([a * cos - b * sin, b * cos + a * sin, unrotated], -1)  #? half partial
    rotated = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)  #? not half
    return rotated  #? not half not partial
    return torch.cat([rotated, unrotated], -1)  #? not half partial
'''


@writes("rope", ignores=("when",))
def rope(context: Context) -> PositionCode:
    """Queries and keys turn."""
    part = context.part
    if part.coords > 1 and context.size("coords") > 1:
        context.refuse("coords", "rotary positions over two coordinates of an image have no writer yet")
    stretch: ScalingCode = ScalingCode() if part.scaling is None else context.write("scaling")
    rotary_dim, ladders = part.rotary_dim(context.scope), part.ladders()  # of mrope one: tokens of text have equal coordinates
    flags = {
        "half": part.pairs == "half",
        "partial": rotary_dim < context.size("head"),
        "stretch": bool(stretch.lines),
        "coords": ladders > 1,
        "amplitude": stretch.amplitude != 1.0,
    }
    context.file.define_at_least_fp32()
    text = fill(
        ROTATE,
        flags,
        rotary_dim=rotary_dim if flags["partial"] else "K",
        two=2 * ladders,
        coords=ladders,
        pairs="pairs" if ladders == 1 else f"{ladders} * pairs",
        stretch=stretch.lines.rstrip("\n"),
        amplitude=stretch.amplitude,
    )
    name = context.file.define("rotate", text)
    return PositionCode(turn=lambda x: f"{name}({x}, base={part.base})")
