"""Law 14, own_number: each kind is compared with literal numbers that Dovetail's own code did not compute.

    @oracle("rope")
    def rope() -> Iterator[Comparison]:
        yield Comparison("position 1", got=module.rotate(x, layout), expected=[[0.54, 0.84]])

The other laws compare implementations with each other, so they cannot catch a mistake that all of them share: rotary pairs
interleaved everywhere, a window of w + 1 in the mask itself. A number from a paper or from a hand calculation can. A user's
package registers oracles for its own kinds in the same way; its kind without an oracle fails the law. Those of Dovetail's own
kinds are in its repository: `dovetail laws --load checks.oracles` runs them.

An oracle runs the part's own code, in the module of a single part with literal weights:

    module = alone(part("rmsnorm", eps=0.1), {"scale": [1.0, 2.0]}, dim="embed", embed=2)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dovetail.nn.ctx import Ctx
from dovetail.nn.groups import GROUPS
from dovetail.nn.layout import TokenLayout
from dovetail.nn.module import holder, make
from dovetail.spec.part import KINDS, Part, walk, weights_of
from dovetail.spec.scope import Scope

NEAR = 1e-6  # relative to the largest expected number: literals have about eight digits


class Comparison(NamedTuple):
    """A computed value (number, tensor, string, list) and the literal it must equal."""

    name: str
    got: Any
    expected: Any
    near: float = NEAR


class Failure(NamedTuple):
    """A comparison that failed: the kind, the comparison's name, and the difference."""

    kind: str
    name: str
    problem: str

    def __str__(self) -> str:
        return f"{self.kind}, {self.name}: {self.problem}"


Oracle = Callable[[], Iterable[Comparison]]
ORACLES: dict[str, list[Oracle]] = {}


def oracle(*kinds: str) -> Callable[[Oracle], Oracle]:
    """Register a function that yields comparisons as an oracle of these kinds."""

    def decorate(function: Oracle) -> Oracle:
        for kind in kinds:
            ORACLES.setdefault(kind, []).append(function)
        return function

    return decorate


def grouped_kinds() -> list[str]:
    """Every registered kind but `block` and `model`, which are in no group."""
    return sorted(kind for kind, cls in KINDS.items() if issubclass(cls, GROUPS))


def kinds_to_test() -> list[str]:
    """The kinds that the law tests: those with an oracle, and every kind of another package, which must have one."""
    ours = __name__.partition(".")[0]
    return [kind for kind in grouped_kinds() if kind in ORACLES or KINDS[kind].__module__.partition(".")[0] != ours]


def missing(kinds: Iterable[str] | None = None) -> list[str]:
    """The kinds without an oracle."""
    return [kind for kind in (grouped_kinds() if kinds is None else kinds) if kind not in ORACLES]


def comparisons(kind: str) -> Iterator[Comparison]:
    """All comparisons of a kind's oracles."""
    for function in ORACLES.get(kind, []):
        yield from function()


def check_oracles(kinds: Iterable[str] | None = None) -> list[Failure]:
    """The failures of the oracles of these kinds, by default of all that the law tests. A kind without an oracle, an oracle
    that compares nothing and one that raises are failures too."""
    failures: list[Failure] = []
    for kind in kinds_to_test() if kinds is None else kinds:
        if kind not in ORACLES:
            failures.append(Failure(kind, "law 14", "has no oracle"))
        for function in ORACLES.get(kind, []):
            failures += _run(kind, function)
    return failures


def _run(kind: str, function: Oracle) -> list[Failure]:
    failures: list[Failure] = []
    compared = 0
    try:
        for comparison in function():
            compared += 1
            problem = differs(comparison)
            if problem:
                failures.append(Failure(kind, comparison.name, problem))
    except Exception as error:  # a part that raises fails its oracle
        return [*failures, Failure(kind, function.__name__, f"{type(error).__name__}: {error}")]
    return failures if compared else [Failure(kind, function.__name__, "compares nothing")]


def differs(comparison: Comparison) -> str:
    """The difference of a comparison; an empty string where it is equal."""
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
    # not (apart > …), so that NaN fails
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


# -- one part by itself, with literal weights -------------------------------------------------------------------------


REAL = torch.float64


def part(kind: str, **fields: Any) -> Any:
    """A part by its kind."""
    return KINDS[kind](**fields)


def numbers(values: Any) -> Tensor:
    """A float64 tensor of literal numbers."""
    return torch.tensor(values, dtype=REAL)


def eye(size: int, times: float = 1.0) -> list[list[float]]:
    """`times` on the diagonal, as plain numbers."""
    return [[times if row == column else 0.0 for column in range(size)] for row in range(size)]


def alone(spec: Part, weights: Mapping[str, Any] | None = None, *, dim: str = "embed", **sizes: int) -> Any:
    """The module of one part in float64. `weights` gives every stored weight, by its path below the part; constants are the
    part's own; `sizes` are the axes that its parents would define, `dim` the axis of a norm."""
    scope = Scope(sizes=sizes, stack="layers").bind(dim=dim)
    module = make(spec, scope)
    given = dict(weights or {})
    for path, below, inside in walk(spec, scope):
        for weight in weights_of(below, inside):
            owner, leaf = holder(module, f"{path}.{weight.name}".lstrip("."))
            if weight.role == "const":
                value = below.constant(weight.name, inside)
                owner.register_buffer(leaf, value.to(REAL) if value.is_floating_point() else value, persistent=False)
            else:
                value = numbers(given.pop(f"{path}.{weight.name}".lstrip(".")))
                assert value.shape == weight.shape(inside), f"{weight.name}: {tuple(value.shape)} is not {weight.shape(inside)}"
                if weight.buffer:
                    owner.register_buffer(leaf, value)
                else:
                    owner.register_parameter(leaf, nn.Parameter(value))
    assert not given, f"{spec.kind} has no weights called {sorted(given)}"
    return module


def row(n: int, start: int = 0) -> TokenLayout:
    """One sequence of n tokens."""
    return TokenLayout.whole(1, n, start=start)


def ctx(n: int) -> Ctx:
    """The ctx of one sequence of n tokens."""
    return Ctx(layout=row(n))
