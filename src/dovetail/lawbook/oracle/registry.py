"""Law 14, its own number: each kind is held to literal numbers, written down and never computed by our own code.

    @oracle("rope")
    def rope() -> Iterator[Comparison]:
        yield Comparison("one turn", got=module.rotate(x, at), expected=[[0.54, 0.84]])

Relations between our own forms cannot see a mistake made in all of them alike: rotary pairs interleaved everywhere, a window
of w + 1 in the mask itself. A number from a paper, from CONCEPTS.md or from a hand calculation can. A stranger's package
registers oracles for its own kinds in the same way; a kind with none fails the law.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dovetail.core.group import GROUPS
from dovetail.core.part import KINDS

NEAR = 1e-6  # relative to the largest expected number: literals are written with eight digits or so


class Comparison(NamedTuple):
    """One number (text, list of numbers …) of ours against the literal it should be."""

    name: str
    got: Any
    expected: Any
    near: float = NEAR


class Failure(NamedTuple):
    """An oracle that did not come true: for which kind, in which comparison, and how."""

    kind: str
    name: str
    problem: str

    def __str__(self) -> str:
        return f"{self.kind}, {self.name}: {self.problem}"


Oracle = Callable[[], Iterable[Comparison]]
ORACLES: dict[str, list[Oracle]] = {}


def oracle(*kinds: str) -> Callable[[Oracle], Oracle]:
    """Hold these kinds to the comparisons the function makes."""

    def decorate(function: Oracle) -> Oracle:
        for kind in kinds:
            ORACLES.setdefault(kind, []).append(function)
        return function

    return decorate


def ask_kinds() -> list[str]:
    """Every registered kind that owes a number: those of a group (a block and a model are only their parts)."""
    return sorted(kind for kind, cls in KINDS.items() if issubclass(cls, GROUPS))


def missing(kinds: Iterable[str] | None = None) -> list[str]:
    """The kinds that have no oracle at all: each a failure of the law."""
    return [kind for kind in (ask_kinds() if kinds is None else kinds) if kind not in ORACLES]


def comparisons(kind: str) -> Iterator[Comparison]:
    """Everything a kind is held to."""
    for function in ORACLES.get(kind, []):
        yield from function()


def check_oracles(kinds: Iterable[str] | None = None) -> list[Failure]:
    """What does not come true among the oracles of these kinds (all that owe one, by default); a kind without an oracle, an
    oracle that compares nothing and one that raises are failures too."""
    found: list[Failure] = []
    for kind in ask_kinds() if kinds is None else kinds:
        if kind not in ORACLES:
            found.append(Failure(kind, "law 14", "has no literal number to be held to"))
        for function in ORACLES.get(kind, []):
            found += _run(kind, function)
    return found


def _run(kind: str, function: Oracle) -> list[Failure]:
    found: list[Failure] = []
    made = 0
    try:
        for comparison in function():
            made += 1
            problem = differs(comparison)
            if problem:
                found.append(Failure(kind, comparison.name, problem))
    except Exception as error:  # a part that breaks where it should give a number does not come true
        return [*found, Failure(kind, function.__name__, f"{type(error).__name__}: {error}")]
    return found if made else [Failure(kind, function.__name__, "compares nothing")]


def differs(comparison: Comparison) -> str:
    """What is wrong with a comparison; the empty text where nothing is."""
    got, expected = comparison.got, comparison.expected
    if not isinstance(got, Tensor):
        got = list(got) if isinstance(got, tuple) else got
        if not _numeric(expected):
            return "" if type(got) is type(expected) and got == expected else f"is {got!r}, not {expected!r}"
        got = torch.tensor(got, dtype=torch.float64)
    have, want = got.detach().to(torch.float64), torch.tensor(expected, dtype=torch.float64)
    if have.shape != want.shape:
        return f"has shape {tuple(have.shape)}, not {tuple(want.shape)}"
    apart = (have - want).abs().max().item() if want.numel() else 0.0
    # the comparison is written this way round so that a NaN fails it
    if apart <= comparison.near * max(1e-12, want.abs().max().item() if want.numel() else 0.0):
        return ""
    return f"is {_short(have)}, not {_short(want)}"


def _numeric(value: Any) -> bool:
    while isinstance(value, list) and value:
        value = value[0]
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _short(x: Tensor) -> str:
    shown = [float(f"{v:.7g}") for v in x.flatten()[:8].tolist()]
    return f"{shown[0] if x.numel() == 1 else shown}" + (" …" if x.numel() > 8 else "")
