"""Rotary positions (RoPE): a function that rotates q and k."""

from __future__ import annotations

from dovetail.codegen.code import fill
from dovetail.codegen.registry import Context, PositionCode, ScalingCode, writes

ROTATE = '''
def $name(x: Tensor, base: float) -> Tensor:  # (B, N, heads, K) -> the same
    """RoPE: channel pair i of token p is rotated by the angle p * base^(-i / pairs).

    Pair i is the channels i and i + $turning/2, so a score depends on the distance alone.  #? half
    Pair i is the channels 2i and 2i + 1, so a score depends on the distance alone.  #? not half
    """
    x, still = x[..., :$turning], x[..., $turning:]  # only the first channels rotate  #? still
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
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)  #? half not still
    return torch.cat([a * cos - b * sin, b * cos + a * sin, still], -1)  #? half still
    turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)  #? not half
    return turned  #? not half not still
    return torch.cat([turned, still], -1)  #? not half still
'''


@writes("rope", ignores=("when",))
def rope(context: Context) -> PositionCode:
    """Queries and keys turn."""
    part = context.part
    if part.coords > 1 and context.size("coords") > 1:
        context.refuse("coords", "rotary positions over two coordinates of an image have no writer yet")
    stretch: ScalingCode = ScalingCode() if part.scaling is None else context.write("scaling")
    turning, ladders = part.turning(context.scope), part.ladders()  # of mrope one: tokens of text have equal coordinates
    flags = {
        "half": part.pairs == "half",
        "still": turning < context.size("head"),
        "stretch": bool(stretch.lines),
        "coords": ladders > 1,
        "amplitude": stretch.amplitude != 1.0,
    }
    context.file.define_at_least_fp32()
    text = fill(
        ROTATE,
        flags,
        turning=turning if flags["still"] else "K",
        two=2 * ladders,
        coords=ladders,
        pairs="pairs" if ladders == 1 else f"{ladders} * pairs",
        stretch=stretch.lines.rstrip("\n"),
        amplitude=stretch.amplitude,
    )
    name = context.file.define("rotate", text)
    return PositionCode(turn=lambda x: f"{name}({x}, base={part.base})")
