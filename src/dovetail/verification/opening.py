"""Open the sides that two strings on the command line name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dovetail.core.errors import FileError
from dovetail.io.untrusted import Directory
from dovetail.port.load import Watch, origin
from dovetail.verification.module_side import emitted, from_file
from dovetail.verification.sides import NativeSide, Side
from dovetail.verification.transformers_side import TransformersSide

EMITTED = "emit:"


def pair(a: str, b: str, user_map: Mapping[str, str] | None = None, *, watch: Watch | None = None) -> tuple[Side, Side]:
    """The two sides that two strings name."""
    if a.startswith(EMITTED) and b.startswith(EMITTED):
        raise FileError(f"{a}, {b}: emitted files hold no weights; one side must be a model directory")
    if a.startswith(EMITTED):
        other = local(b, user_map, watch=watch)
        return emitted(a.removeprefix(EMITTED), other), other
    first = local(a, user_map, watch=watch)
    return first, emitted(b.removeprefix(EMITTED), first) if b.startswith(EMITTED) else local(b, user_map, watch=watch)


def local(text: str, user_map: Mapping[str, str] | None = None, *, watch: Watch | None = None) -> Side:
    """The side that a string names, run on this machine."""
    kind, colon, rest = text.partition(":")
    if colon and kind == "hf":
        return TransformersSide(rest)
    if colon and kind == "py":
        return from_file(rest, user_map or {})
    if not Path(text).is_dir():
        raise FileError(
            f"{text}: no such directory; a side is a directory, hf:DIR, py:FILE.py:FACTORY, emit:FILE.py or http://…"
        )
    origin(Directory(text))
    return NativeSide(text, watch=watch)
