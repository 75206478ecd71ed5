"""Wires: the lines by which a block adds its branches to the residual stream; and norms over the last
dimension.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from dovetail.codegen.code import BODY, WIDTH, Call, fill, signature
from dovetail.codegen.registry import Context, Join, WireCode, writes

LAYER_SCALE = '''
class $name(nn.Module):
    """LayerScale: a learned factor per channel for each branch."""  #? learned not stream
    """Factors: a learned one per channel for each branch, and one of the residual stream."""  #? learned stream
    """A factor of the residual stream, which is not trained."""  #? not learned

    $init
        super().__init__()
        self.scale = nn.Parameter(torch.full((branches, width), begin))  #? learned
        self.register_buffer("stream", torch.ones(1))  #? stream
'''


def _code(context: Context, doc: str, lines: list[str], out: str = "x") -> WireCode:
    """The lines of a wire, and the module that holds its factors, where there are any."""
    part, sizes = context.part, {}
    learned, stream = part.layer_scale is not None, part.stream_scale
    if not learned and not stream:
        return WireCode(doc, lines, out)
    if learned:
        sizes = {"branches": context.size("branches"), "width": context.size("embed"), "begin": part.layer_scale}
    given = ["branches: int", "width: int", "begin: float"] if learned else []
    text = fill(LAYER_SCALE, {"learned": learned, "stream": stream}, init=signature("__init__", given))
    name = context.file.define("LayerScale" if learned else "StreamScale", text, "StreamLayerScale")
    last = [f"{out} = {out} * self.wire.stream"] if stream else []
    return WireCode(doc, [*lines, *last], out, Call.to(name, **sizes))


def _added(context: Context, number: int, what: str) -> str:
    """What a branch really adds."""
    part = context.part
    if part.layer_scale is not None:
        what = f"{what} * self.wire.scale[{number}]"
    if part.multiplier != 1.0:
        what = f"{what} * {part.multiplier}"
    return f"self.dropout({what})" if part.dropout else what


def _lines(context: Context, number: int, call: str, join: str) -> list[str]:
    """`x = …` with the branch's output in the placeholder of `join`: one line, or two where one would be too long."""
    line = join.format(_added(context, number, call))
    return [line] if BODY + len(line) <= WIDTH else [f"y = {call}", join.format(_added(context, number, "y"))]


def _numbered(steps: Sequence[Mapping[str, str]]) -> Iterator[tuple[str, list[tuple[int, str, str]]]]:
    """(the name of a step, its branches as (number, name, call))."""
    number = 0
    for step in steps:
        yield next(iter(step)), [(number + i, name, call) for i, (name, call) in enumerate(step.items())]
        number += len(step)


def _sum(context: Context, step: Sequence[tuple[int, str, str]], read: str, join: str) -> list[str]:
    """`x = …` with the sum of what the branches of a step add, all of which read `read`."""
    if len(step) == 1:
        return _lines(context, step[0][0], step[0][2].format(read), join)
    lines = [] if read.isidentifier() else [f"h = {read}"]
    read = read if read.isidentifier() else "h"
    for i, (number, _, call) in enumerate(step):
        lines += _lines(context, number, call.format(read), "total = total + {}" if i else "total = {}")
    return [*lines, join.format("total")]


def _each(context: Context, step: Sequence[tuple[int, str, str]]) -> list[str]:
    """`x = …` with one branch after the other added to it; all read what x was. A call has its norms around it."""
    if len(step) == 1:
        return _lines(context, step[0][0], step[0][2], "x = x + {}")
    lines = ["out = x"]
    for number, _, call in step:
        lines += _lines(context, number, call, "out = out + {}")
    return [*lines, "x = out"]


@writes("pre_norm")
def pre_norm(context: Context) -> Join:
    """x + f(norm x)."""

    def join(steps: Sequence[Mapping[str, str]]) -> WireCode:
        lines: list[str] = []
        for i, (name, step) in enumerate(_numbered(steps)):
            lines += _sum(context, step, f"self.{name}_norm(x)" if i or context.part.first_norm else "x", "x = x + {}")
        doc = "Pre-norm: each branch adds to the residual stream, x + f(norm(x))."
        return _code(context, doc, lines)

    return join


@writes("post_norm")
def post_norm(context: Context) -> Join:
    """norm(x + f x)."""

    def join(steps: Sequence[Mapping[str, str]]) -> WireCode:
        lines: list[str] = []
        for name, step in _numbered(steps):
            lines += _sum(context, step, "x", f"x = self.{name}_norm(x + {{}})")
        doc = "Post-norm: each sum is normalized, norm(x + f(x))."
        return _code(context, doc, lines)

    return join


@writes("sandwich_norm")
def sandwich_norm(context: Context) -> Join:
    """x + norm(f(norm x))."""

    def join(steps: Sequence[Mapping[str, str]]) -> WireCode:
        lines: list[str] = []
        for _, step in _numbered(steps):
            within = [(i, name, f"self.{name}_post_norm({call.format(f'self.{name}_norm(x)')})") for i, name, call in step]
            lines += _each(context, within)
        return _code(context, "Norms before and after each branch: x + norm(f(norm(x))).", lines)

    return join


@writes("res_post_norm")
def res_post_norm(context: Context) -> Join:
    """x + norm(f x)."""

    def join(steps: Sequence[Mapping[str, str]]) -> WireCode:
        lines: list[str] = []
        for _, step in _numbered(steps):
            lines += _each(context, [(i, name, f"self.{name}_norm({call.format('x')})") for i, name, call in step])
        return _code(context, "The output of each branch is normalized: x + norm(f(x)).", lines)

    return join


@writes("parallel")
def parallel(context: Context) -> Join:
    """x + f(norm x) + g(norm x)."""

    def join(steps: Sequence[Mapping[str, str]]) -> WireCode:
        one = context.part.one_norm
        lines = ["out, h = x, self.norm(x)"] if one else ["out = x"]
        for name, step in _numbered(steps):
            lines += _sum(context, step, "h" if one else f"self.{name}_norm(x)", "out = out + {}")
        doc = "Parallel branches: x + f(norm(x)) + g(norm(x))."
        return _code(context, doc, lines, "out")

    return join


RMS = '''
class $name(nn.Module):
    """x / sqrt(mean(x^2) + eps)$times, over $what."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.scale = nn.Parameter(torch.ones(dim))  #? scale not plus_one
        self.scale = nn.Parameter(torch.zeros(dim))  # the distance from 1  #? scale plus_one

    def forward(self, x: Tensor) -> Tensor:  # (..., dim) -> (..., dim)
        return F.rms_norm(x, (x.shape[-1],), $scale, self.eps)  #? not groups
        x = x.unflatten(-1, ($count, -1))  #? groups
        return F.rms_norm(x, (x.shape[-1],), None, self.eps).flatten(-2)$bracketed  #? groups
'''

LAYER = '''
class $name(nn.Module):
    """(x - mean(x)) / sqrt(var(x) + eps) * scale + shift, over the last dimension."""  #? shift
    """(x - mean(x)) / sqrt(var(x) + eps) * scale, over the last dimension."""  #? not shift

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.scale = nn.Parameter(torch.ones(dim))  #? not plus_one
        self.scale = nn.Parameter(torch.zeros(dim))  # the distance from 1  #? plus_one
        self.shift = nn.Parameter(torch.zeros(dim))  #? shift

    def forward(self, x: Tensor) -> Tensor:  # (..., dim) -> (..., dim)
        return F.layer_norm(x, (x.shape[-1],), $scale, self.shift, self.eps)  #? shift
        return F.layer_norm(x, (x.shape[-1],), $scale, None, self.eps)  #? not shift
'''


@writes("rmsnorm")
def rms(context: Context) -> Call:
    """RMSNorm."""
    part = context.part
    what = "the last dimension" if part.groups == 1 else f"each of {part.groups} groups of the last dimension"
    scale, factor = ("self.scale + 1.0", "(1 + scale)") if part.plus_one else ("self.scale", "scale")
    text = fill(
        RMS,
        {"scale": part.scale, "plus_one": part.plus_one, "groups": part.groups > 1},
        what=what,
        scale=scale if part.scale else "None",
        times=f" * {factor}" if part.scale else "",
        count=part.groups,
        bracketed="" if not part.scale else f" * ({scale})" if part.plus_one else f" * {scale}",
    )
    kinds = {"GroupedRMSNorm": part.groups > 1, "FreeRMSNorm": not part.scale, "OffsetRMSNorm": part.plus_one}
    other = next((name for name, is_it in kinds.items() if is_it), "PlainRMSNorm")
    name = context.file.define("RMSNorm", text, other)
    return Call.to(name, dim=context.size("dim"), eps=context.part.eps)


@writes("layernorm")
def layernorm(context: Context) -> Call:
    """LayerNorm."""
    shift, plus_one = context.part.shift, context.part.plus_one
    text = fill(LAYER, {"shift": shift, "plus_one": plus_one}, scale="self.scale + 1.0" if plus_one else "self.scale")
    name = context.file.define("LayerNorm", text, "OffsetLayerNorm" if plus_one else "")
    return Call.to(name, dim=context.size("dim"), eps=context.part.eps)
