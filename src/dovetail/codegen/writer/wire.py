"""Wires: the lines by which a block joins its branches to the stream."""

from __future__ import annotations

from collections.abc import Mapping

from dovetail.codegen.code import BODY, WIDTH, Call, fill
from dovetail.codegen.registry import Here, Join, Wiring, writes

LAYER_SCALE = '''
class $name(nn.Module):
    """A learned number a channel for what each branch adds."""

    def __init__(self, branches: int, width: int, begin: float):
        super().__init__()
        self.scale = nn.Parameter(torch.full((branches, width), begin))
'''


def _scale(here: Here) -> Call | None:
    """The module that holds the learned scales, where there are any."""
    if here.part.layer_scale is None:
        return None
    sizes = {"branches": here.size("branches"), "width": here.size("embed"), "begin": here.part.layer_scale}
    return Call.to(here.file.define("LayerScale", fill(LAYER_SCALE)), **sizes)


def _added(here: Here, number: int, what: str) -> str:
    """What a branch really adds."""
    part = here.part
    if part.layer_scale is not None:
        what = f"{what} * self.wire.scale[{number}]"
    if part.multiplier != 1.0:
        what = f"{what} * {part.multiplier}"
    return f"self.dropout({what})" if part.dropout else what


def _lines(here: Here, number: int, call: str, join: str) -> list[str]:
    """`x = …` with what a branch adds in the hole of `join`: one line, or two where one would be too long."""
    line = join.format(_added(here, number, call))
    return [line] if BODY + len(line) <= WIDTH else [f"y = {call}", join.format(_added(here, number, "y"))]


@writes("pre_norm")
def pre_norm(here: Here) -> Join:
    """x + f(norm x)."""

    def join(calls: Mapping[str, str]) -> Wiring:
        lines: list[str] = []
        for i, (name, call) in enumerate(calls.items()):
            normed = f"self.{name}_norm(x)" if i or here.part.first_norm else "x"
            lines += _lines(here, i, call.format(normed), "x = x + {}")
        doc = "Each branch reads the normed stream and adds to it: x + f(norm(x))."
        return Wiring(doc, lines, scale=_scale(here))

    return join


@writes("post_norm")
def post_norm(here: Here) -> Join:
    """norm(x + f x)."""

    def join(calls: Mapping[str, str]) -> Wiring:
        lines: list[str] = []
        for i, (name, call) in enumerate(calls.items()):
            lines += _lines(here, i, call.format("x"), f"x = self.{name}_norm(x + {{}})")
        doc = "Each branch adds to the stream, which is normed afterwards: norm(x + f(x))."
        return Wiring(doc, lines, scale=_scale(here))

    return join


@writes("sandwich_norm")
def sandwich_norm(here: Here) -> Join:
    """x + norm(f(norm x))."""

    def join(calls: Mapping[str, str]) -> Wiring:
        lines: list[str] = []
        for i, (name, call) in enumerate(calls.items()):
            normed = f"self.{name}_post_norm({call.format(f'self.{name}_norm(x)')})"
            lines += _lines(here, i, normed, "x = x + {}")
        return Wiring("Norms before and after each branch: x + norm(f(norm(x))).", lines, scale=_scale(here))

    return join


@writes("res_post_norm")
def res_post_norm(here: Here) -> Join:
    """x + norm(f x)."""

    def join(calls: Mapping[str, str]) -> Wiring:
        lines: list[str] = []
        for i, (name, call) in enumerate(calls.items()):
            normed = f"self.{name}_norm({call.format('x')})"
            lines += _lines(here, i, normed, "x = x + {}")
        return Wiring("What a branch adds is normed first: x + norm(f(x)).", lines, scale=_scale(here))

    return join


@writes("parallel")
def parallel(here: Here) -> Join:
    """x + f(norm x) + g(norm x)."""

    def join(calls: Mapping[str, str]) -> Wiring:
        one = here.part.one_norm
        lines = ["out, h = x, self.norm(x)"] if one else ["out = x"]
        for i, (name, call) in enumerate(calls.items()):
            read = "h" if one else f"self.{name}_norm(x)"
            lines += _lines(here, i, call.format(read), "out = out + {}")
        doc = "All branches read the same stream: x + f(norm(x)) + g(norm(x))."
        return Wiring(doc, lines, "out", _scale(here))

    return join
