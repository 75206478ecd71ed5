"""Open the sides that strings or models name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from torch import nn

from dovetail.core.errors import FileError
from dovetail.disk.untrusted import Directory
from dovetail.hf.load import Watch, origin
from dovetail.model import ModelModule
from dovetail.proof.compare.sides import ModelSide, ModuleSide, NativeSide, Side, emitted, from_file
from dovetail.proof.compare.transformers_side import TransformersSide

SideLike = str | Path | ModelModule | Callable[[], nn.Module]  # see sides.py
EMITTED, DUMP = "emit:", "dump:"


def pair(
    a: SideLike, b: SideLike, user_map: Mapping[str, str] | None = None, *, watch: Watch | None = None
) -> tuple[Side, Side]:
    """The two sides that two strings or models name."""
    files = [value.removeprefix(EMITTED) if isinstance(value, str) and value.startswith(EMITTED) else None for value in (a, b)]
    if files[0] is not None and files[1] is not None:
        raise FileError(f"{a}, {b}: emitted files hold no weights; one side must be a model directory")
    if files[0] is not None:
        other = local(b, user_map, watch=watch)
        return emitted(files[0], other), other
    first = local(a, user_map, watch=watch)
    return first, local(b, user_map, watch=watch) if files[1] is None else emitted(files[1], first)


def local(value: SideLike, user_map: Mapping[str, str] | None = None, *, watch: Watch | None = None) -> Side:
    """The side that a string, a model or a function that returns a module names, run on this machine."""
    if isinstance(value, ModelModule):
        return ModelSide(value)
    if isinstance(value, nn.Module):
        name = type(value).__name__
        raise FileError(
            f"{name}: a module is also compared in float64, with constants computed in float64; give a function that returns it"
        )
    if not isinstance(value, (str, Path)):
        return ModuleSide(getattr(value, "__name__", type(value).__name__), value, user_map)
    text = str(value)
    kind, colon, rest = text.partition(":")
    if colon and kind == "hf":
        return TransformersSide(rest)
    if colon and kind == "py":
        return from_file(rest, user_map or {})
    if not Path(text).is_dir():
        raise FileError(
            f"{text}: no such directory; a side is a directory, hf:DIR, py:FILE.py:FACTORY, emit:FILE.py, dump:DIR, "
            f"ENGINE:MODEL or http://…"
        )
    origin(Directory(text))
    return NativeSide(text, watch=watch)
