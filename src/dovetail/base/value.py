"""Values of options: whether one has the type of its annotation, what that type is called, and what is wrong with a value.

The command line, run files and calls from Python ask here. A type that a module imports for type checkers only is Unresolved:
beside other types it accepts objects, by itself any value.
"""

from __future__ import annotations

import builtins
import functools
import numbers
import os
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from dovetail.base.errors import names_or_nearest

WORDS: Mapping[Any, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "a string", Path: "a path"}
SCALARS: Mapping[Any, type | tuple[type, ...]] = {int: numbers.Integral, float: numbers.Real, Path: (str, os.PathLike)}
PLAIN = (bool, int, float, str, bytes, list, tuple, dict, set, type(None))  # of a type that every module knows
LONGEST = 60  # characters of a value in a message


class _Attributes(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return cls


class Unresolved(metaclass=_Attributes):
    """A type that is imported for type checkers only, as torch.dtype."""


class TypeNames(dict[str, Any]):
    """Names of an annotation that its module imports for type checkers only."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.module = vars(sys.modules[function.__module__])

    def __missing__(self, name: str) -> Any:
        if name in self.module or hasattr(builtins, name):
            raise KeyError(name)  # it is found there
        return Unresolved


@functools.cache
def options(hint: Any) -> tuple[Any, ...]:
    """The members of a union, or the one type."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def alternatives(hint: Any) -> tuple[Any, ...]:
    """Return the types of a union without None and those that are not imported, or the one type."""
    return tuple(kind for kind in options(hint) if kind not in (type(None), Any, Unresolved))


def values_of(hint: Any) -> tuple[Any, ...]:
    """Return the values of a Literal, also of one in a union; () if there is none."""
    return next((get_args(kind) for kind in alternatives(hint) if get_origin(kind) is Literal), ())


def type_problem(value: Any, hint: Any) -> str | None:
    """Return what is wrong with a value that does not have the type of an annotation; None if it has."""
    if fits(value, hint):
        return None
    kinds, shown = alternatives(hint), repr(value)[:LONGEST]
    if isinstance(value, str) and all(get_origin(kind) is Literal for kind in kinds):
        return f"{shown} is none of its values; {names_or_nearest(value, values_of(hint), 'values')}"
    return f"{shown} is not {in_words(hint)}" + (f"; give [{shown}]" if fits([value], hint) else "")


def fits(value: Any, hint: Any) -> bool:
    """Whether a value has the type of an annotation."""
    kind, inner = get_origin(hint), get_args(hint)
    if kind in (typing.Union, types.UnionType):
        other = bool(alternatives(hint)) and Unresolved in inner and type(value) not in PLAIN
        return other or any(fits(value, one) for one in inner if one is not Unresolved or not alternatives(hint))
    if kind is Annotated:
        return fits(value, inner[0])
    if kind is Literal:
        return isinstance(value, str | int) and value in inner
    if kind is tuple and Ellipsis not in inner:
        return isinstance(value, tuple | list) and len(value) == len(inner) and all(map(fits, value, inner))
    kind = kind or hint
    if kind in (Any, Unresolved) or not isinstance(kind, type):
        return True
    if kind in SCALARS:
        return isinstance(value, SCALARS[kind]) and not isinstance(value, bool)
    if not inner or issubclass(kind, Mapping) or kind is Callable:
        return isinstance(value, kind)
    if isinstance(value, tuple | list):
        return all(fits(item, inner[0]) for item in value)
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)


def in_words(hint: Any) -> str:
    """Return what a value of an annotation is called: `a whole number`, `a path or a string`. Kinds are sorted, names before
    them: Python caches unions of the same types, in the order of the first."""
    kind, inner = get_origin(hint), get_args(hint)
    if kind in (typing.Union, types.UnionType):
        kinds = sorted(alternatives(hint), key=lambda one: (get_origin(one) is not Literal, in_words(one)))
        return " or ".join(dict.fromkeys(map(in_words, kinds)))
    if kind is Literal:
        return " or ".join(map(str, inner))
    if kind is tuple and Ellipsis not in inner:
        return f"a list of {len(inner)} numbers"
    if kind is None:
        return WORDS.get(hint) or f"of the type {hint.__name__}"
    return "a function" if kind is Callable else "a mapping" if issubclass(kind, Mapping) else "a list"
