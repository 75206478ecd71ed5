"""Folds over a spec: parameter counts, FLOPs, decode-state sizes and addresses, summed over the declarations of its parts.

No tensor is allocated.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from fractions import Fraction
from math import prod
from types import MappingProxyType
from typing import NamedTuple

from dovetail.base.errors import SpecError
from dovetail.spec.part import Part, walk, weights_of
from dovetail.spec.scope import Scope
from dovetail.spec.weight import State, Weight


class Declared(NamedTuple):
    """One declared weight: its path, its declaration, its scope, and the part that declares it."""

    path: str
    weight: Weight
    scope: Scope
    part: Part
    frozen: bool = False  # whether it belongs to a base that an adapter is trained on: neither trained nor checkpointed
    fixed: bool = False  # whether a run leaves it as it is, and checkpoints it with the others

    @property
    def size(self) -> int:
        """The number of values."""
        return prod(self.weight.shape(self.scope))

    @property
    def trained(self) -> bool:
        """Whether an optimizer updates it."""
        return self.weight.learned and not self.frozen and not self.fixed

    @property
    def checkpointed(self) -> bool:
        """Whether a checkpoint of a run contains it."""
        return self.weight.stored and not self.frozen


def declared(spec: Part) -> Iterator[Declared]:
    """Every declared weight and constant, in module order."""
    for path, part, scope in walk(spec):
        for weight in weights_of(part, scope):
            yield Declared(f"{path}.{weight.name}".lstrip("."), weight, scope, part)


def parameters(spec: Part) -> int:
    """The number of parameters; a tied weight counts once."""
    return sum(d.size for d in declared(spec) if d.weight.learned)


def active_parameters(spec: Part) -> int:
    """The number of parameters that one token uses: of an MoE, only the experts that it is routed to."""
    return int(sum((d.size * d.weight.used for d in declared(spec) if d.weight.learned), Fraction(0)))


def needs_of(spec: Part) -> frozenset[str]:
    """The features that an attention kernel must offer to run every part of a spec."""
    return frozenset[str]().union(*(part.needs() for _, part, _ in walk(spec)))


def matmul_flops(spec: Part) -> int:
    """FLOPs per token in matmuls with weights (2 per multiply-add); a tied weight counts wherever it is used. Parts that run in
    training and drafting only are left out, see `ahead_flops`."""
    return int(sum((_matmul(d) for d in declared(spec) if not d.scope.drafts), Fraction(0)))


def _matmul(d: Declared) -> Fraction:
    return 2 * d.size * d.weight.used if d.weight.matmul else Fraction(0)


def attention_flops(spec: Part, n: int) -> tuple[int, int]:
    """Activation × activation FLOPs over n tokens: (all pairs, as the reference computes them; the pairs that masks leave)."""
    costs = [part.cost(scope, n) for _, part, scope in walk(spec) if not scope.drafts]
    return sum(c[0] for c in costs), sum(c[1] for c in costs)


def ahead_flops(spec: Part, n: int) -> tuple[int, int]:
    """FLOPs of the depths of multi-token prediction over n tokens, without the head: (all pairs; the pairs that masks leave).
    Depth k, in layer k − 1 of its stack, has n − k tokens."""
    matmul = int(sum((_matmul(d) * max(n - d.scope.layer - 1, 0) for d in declared(spec) if d.scope.drafts), Fraction(0)))
    costs = [part.cost(scope, max(n - scope.layer - 1, 0)) for _, part, scope in walk(spec) if scope.drafts]
    return matmul + sum(c[0] for c in costs), matmul + sum(c[1] for c in costs)


def states(spec: Part) -> Iterator[tuple[str, State, Scope]]:
    """(path, state, scope) of every declared decode state."""
    for path, part, scope in walk(spec):
        for state in part.state(scope):
            yield path, state, scope


def state_values(spec: Part, n: int) -> int:
    """The number of values in the decode state after n tokens (and n source tokens, where there is an encoder)."""
    return sum(state.values(scope, n) for _, state, scope in states(spec))


@functools.lru_cache(maxsize=64)  # every call of generate asks: a fold over 32 layers takes 50 ms
def position_limit(spec: Part) -> int | None:
    """The most tokens per sequence that tables of positions allow; None where there is no table."""
    return min((d.scope.size("position") for d in declared(spec) if "position" in d.weight.out), default=None)


@functools.lru_cache(maxsize=64)
def over_vocab(spec: Part) -> frozenset[str]:
    """Which children have a weight over the vocabulary: `embed` then reads tokens, and `head` predicts them."""
    return frozenset(d.path.partition(".")[0] for d in declared(spec) if "vocab" in d.weight.out)


def targets(spec: Part, role: str = "linear") -> list[str]:
    """Paths of the weights of one role: the targets of adapters and quantizers."""
    return [d.path for d in declared(spec) if d.weight.role == role and d.weight.learned]


@functools.lru_cache(maxsize=64)
def taps(spec: Part) -> Mapping[str, str]:
    """The address of every activation that a listener can read and replace, a module's path and a tap's name, and its axes."""
    declared = ((path, part.taps(scope).items()) for path, part, scope in walk(spec))
    return MappingProxyType({f"{path}.{name}".lstrip("."): axes for path, each in declared for name, axes in each})


def check_patterns(patterns: Iterable[str], addresses: Collection[str], problem: str) -> None:
    """Raise SpecError with the problem, and the nearest pattern or address, for a pattern that matches none of them."""
    for pattern in patterns:
        if any(fnmatchcase(address, pattern) for address in addresses):
            continue
        stem, _, name = pattern.rpartition(".")
        names = sorted({address.rpartition(".")[2] for address in addresses})
        near = [f"{stem or '*'}.{n}" for n in get_close_matches(name, names, 1)] + get_close_matches(pattern, addresses, 1)
        near = [one for one in near if any(fnmatchcase(address, one) for address in addresses)]
        remedy = f"did you mean {near[0]!r}?" if near else f"addresses end in {', '.join(names)}; try '*.{names[0]}'"
        raise SpecError(pattern, problem, remedy)
