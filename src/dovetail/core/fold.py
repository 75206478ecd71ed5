"""Folds over a spec: each a short sum over what the parts declare. No tensor is made."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from math import prod
from typing import NamedTuple

from dovetail.core.part import Part, walk
from dovetail.core.scope import Scope
from dovetail.core.weight import State, Weight

NO_DECAY = frozenset({"norm", "bias", "gate"})


class Declared(NamedTuple):
    """One declared weight: where it stands, what it is, in which scope, by which part."""

    path: str
    weight: Weight
    scope: Scope
    part: Part

    @property
    def size(self) -> int:
        """How many numbers it holds."""
        return prod(self.weight.shape(self.scope))


def declared(spec: Part) -> Iterator[Declared]:
    """Every declared weight and constant, in module order."""
    for path, part, scope in walk(spec):
        for weight in part.weights(scope):
            yield Declared(f"{path}.{weight.name}".lstrip("."), weight, scope, part)


def parameters(spec: Part) -> int:
    """Learned numbers, each counted once however many places share it."""
    return sum(d.size for d in declared(spec) if d.weight.learned)


def active_parameters(spec: Part) -> int:
    """Learned numbers that one token meets."""
    return int(sum((d.size * d.weight.used for d in declared(spec) if d.weight.learned), Fraction(0)))


def matmul_flops(spec: Part) -> int:
    """Multiply-adds (×2) of one token with the weights; a shared weight counts wherever it is used."""
    return int(sum((2 * d.size * d.weight.used for d in declared(spec) if d.weight.matmul), Fraction(0)))


def attention_flops(spec: Part, n: int) -> tuple[int, int]:
    """Activation × activation FLOPs over n tokens: as the readable path computes them, and as the masks let through."""
    costs = [part.cost(scope, n) for _, part, scope in walk(spec)]
    return sum(c[0] for c in costs), sum(c[1] for c in costs)


def states(spec: Part) -> Iterator[tuple[str, State, Scope]]:
    """(path, state, scope) of everything remembered while decoding."""
    for path, part, scope in walk(spec):
        for state in part.state(scope):
            yield path, state, scope


def state_values(spec: Part, n: int) -> int:
    """Numbers remembered after n tokens (and a source of n tokens, where there is one)."""
    return sum(state.values(scope, n) for _, state, scope in states(spec))


def targets(spec: Part, role: str = "linear") -> list[str]:
    """Paths of the weights of one role: what an adapter or a quantizer may wrap."""
    return [d.path for d in declared(spec) if d.weight.role == role and d.weight.learned]


def optimizer_groups(spec: Part) -> dict[str, list[str]]:
    """Weight paths that decay (matrices and tables) and those that do not (norms, biases, gates)."""
    groups: dict[str, list[str]] = {"decay": [], "no_decay": []}
    for d in declared(spec):
        if d.weight.learned:
            groups["no_decay" if d.weight.role in NO_DECAY else "decay"].append(d.path)
    return groups


def taps(spec: Part) -> list[str]:
    """The address of every activation that can be seen and replaced."""
    return [f"{path}.{name}".lstrip(".") for path, part, _ in walk(spec) for name in part.taps()]
