"""Wires: the lines by which a block adds its branches to the residual stream."""

from __future__ import annotations

from collections.abc import Mapping

from dovetail.codegen.code import BODY, WIDTH, Call, fill
from dovetail.codegen.registry import Context, Join, WireCode, writes

LAYER_SCALE = '''
class $name(nn.Module):
    """LayerScale: a learned factor per channel for each branch."""

    def __init__(self, branches: int, width: int, begin: float):
        super().__init__()
        self.scale = nn.Parameter(torch.full((branches, width), begin))
'''


def _scale(context: Context) -> Call | None:
    """The module that holds the learned scales, where there are any."""
    if context.part.layer_scale is None:
        return None
    sizes = {"branches": context.size("branches"), "width": context.size("embed"), "begin": context.part.layer_scale}
    return Call.to(context.file.define("LayerScale", fill(LAYER_SCALE)), **sizes)


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


@writes("pre_norm")
def pre_norm(context: Context) -> Join:
    """x + f(norm x)."""

    def join(calls: Mapping[str, str]) -> WireCode:
        lines: list[str] = []
        for i, (name, call) in enumerate(calls.items()):
            normed = f"self.{name}_norm(x)" if i or context.part.first_norm else "x"
            lines += _lines(context, i, call.format(normed), "x = x + {}")
        doc = "Pre-norm: each branch adds to the residual stream, x + f(norm(x))."
        return WireCode(doc, lines, scale=_scale(context))

    return join


@writes("post_norm")
def post_norm(context: Context) -> Join:
    """norm(x + f x)."""

    def join(calls: Mapping[str, str]) -> WireCode:
        lines: list[str] = []
        for i, (name, call) in enumerate(calls.items()):
            lines += _lines(context, i, call.format("x"), f"x = self.{name}_norm(x + {{}})")
        doc = "Post-norm: each sum is normalized, norm(x + f(x))."
        return WireCode(doc, lines, scale=_scale(context))

    return join


@writes("sandwich_norm")
def sandwich_norm(context: Context) -> Join:
    """x + norm(f(norm x))."""

    def join(calls: Mapping[str, str]) -> WireCode:
        lines: list[str] = []
        for i, (name, call) in enumerate(calls.items()):
            normed = f"self.{name}_post_norm({call.format(f'self.{name}_norm(x)')})"
            lines += _lines(context, i, normed, "x = x + {}")
        return WireCode("Norms before and after each branch: x + norm(f(norm(x))).", lines, scale=_scale(context))

    return join


@writes("res_post_norm")
def res_post_norm(context: Context) -> Join:
    """x + norm(f x)."""

    def join(calls: Mapping[str, str]) -> WireCode:
        lines: list[str] = []
        for i, (name, call) in enumerate(calls.items()):
            normed = f"self.{name}_norm({call.format('x')})"
            lines += _lines(context, i, normed, "x = x + {}")
        return WireCode("The output of each branch is normalized: x + norm(f(x)).", lines, scale=_scale(context))

    return join


@writes("parallel")
def parallel(context: Context) -> Join:
    """x + f(norm x) + g(norm x)."""

    def join(calls: Mapping[str, str]) -> WireCode:
        one = context.part.one_norm
        lines = ["out, h = x, self.norm(x)"] if one else ["out = x"]
        for i, (name, call) in enumerate(calls.items()):
            read = "h" if one else f"self.{name}_norm(x)"
            lines += _lines(context, i, call.format(read), "out = out + {}")
        doc = "Parallel branches: x + f(norm(x)) + g(norm(x))."
        return WireCode(doc, lines, "out", _scale(context))

    return join
