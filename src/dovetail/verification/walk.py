"""Walk: two sides, one prompt, tap by tap in the order of computing; the first that leaves its envelope.

    gap     = max over tokens |aₜ − bₜ| / root mean square over tokens of |bₜ|, both in the dtype of the sides
    exact   = the same of their float64 runs
    own     = a side's distance from its own float64 run

A gap whose exact twin stays is structural: two different functions. One that vanishes in float64 is rounding, however large.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from dovetail.model import Model
from dovetail.verification.envelope import envelope
from dovetail.verification.match import Place, comparable, layer_of, rows_of, same_named
from dovetail.verification.prompt import Prompt
from dovetail.verification.record import Recording
from dovetail.verification.sides import Local, run

EXACT = torch.float64
Word = Literal["equal", "rounding", "structural"]
Told = Callable[[str], None]  # what is being done now


@dc.dataclass(frozen=True)
class Tap:
    """One compared activation."""

    address: str
    gap: float
    exact: float
    own_a: float
    own_b: float
    allowed: float  # the envelope of `gap`
    allowed_exact: float  # the envelope of `exact`

    @property
    def structural(self) -> bool:
        """Whether the two compute different things up to here."""
        return not self.exact <= self.allowed_exact

    @property
    def rounding(self) -> bool:
        """Whether they are further apart than clean pairs are, and yet compute the same."""
        return not self.structural and not self.gap <= self.allowed


@dc.dataclass
class Walked:
    """All taps in order, and what was recorded."""

    taps: list[Tap]
    dtypes: tuple[torch.dtype, torch.dtype]
    exact: tuple[Recording, Recording]
    missing: list[str]  # addresses that one side has and the other has not, or in another shape

    @property
    def first(self) -> Tap | None:
        """The first tap at which the two are not the same function."""
        return next((tap for tap in self.taps if tap.structural), None)

    @property
    def first_rounding(self) -> Tap | None:
        """The first tap that rounds further than clean pairs do."""
        return next((tap for tap in self.taps if tap.rounding), None)

    @property
    def verdict(self) -> Word:
        """equal, rounding or structural."""
        return "structural" if self.first else "rounding" if self.first_rounding else "equal"


def walk(a: Local, b: Local, prompt: Prompt, *, dtype: torch.dtype | None = None, told: Told = lambda note: None) -> Walked:
    """Run both sides in their dtype and in float64 and compare what they have in common."""
    spec = a.spec or b.spec
    dtypes = (dtype or a.dtype, dtype or b.dtype)
    sizes = {} if spec is None else comparable(spec)
    recorded = []
    for kind in ("float64", "own"):
        for i, side in enumerate((a, b)):
            told(f"{side.label}, {'float64' if kind == 'float64' else str(dtypes[i]).removeprefix('torch.')}")
            wanted = EXACT if kind == "float64" else dtypes[i]
            recorded.append(run(side, prompt, wanted, _places(a, b, side, spec), sizes))
    return compared(recorded[0], recorded[1], recorded[2], recorded[3], prompt, dtypes)


def _places(a: Local, b: Local, side: Local, spec: Model | None) -> Callable[[nn.Module], Sequence[Place]]:
    if spec is not None:
        return lambda module: side.places(module, spec)
    other = b if side is a else a
    return lambda module: same_named(module, other.made(other.dtype))


def compared(
    exact_a: Recording,
    exact_b: Recording,
    own_a: Recording,
    own_b: Recording,
    prompt: Prompt,
    dtypes: tuple[torch.dtype, torch.dtype],
) -> Walked:
    """The taps that both sides have, in the first side's order."""
    taps, missing = [], []
    depth = len({layer_of(address) for address in exact_a.taps} - {"embed", "head"})
    for address, x in exact_a.taps.items():
        same = exact_a.alias.get(address)
        if same is not None and exact_b.alias.get(address) == same:
            continue  # handed on alike: compared already
        y = exact_b.taps.get(address)
        pair = None if y is None else _alike(x, y, prompt)
        if pair is None or address not in own_a.taps or address not in own_b.taps:
            missing.append(address)
            continue
        x64, y64 = pair
        size, limits = scale(y64), envelope(dtypes, layers_before(address, depth))
        x_own, y_own = (own.taps[address].to(EXACT).reshape(x64.shape) for own in (own_a, own_b))
        taps.append(
            Tap(
                address,
                gap(x_own, y_own, size),
                gap(x64, y64, size),
                gap(x_own, x64, size),
                gap(y_own, y64, size),
                limits.rounding,
                limits.exact,
            )
        )
    missing += [address for address in exact_b.taps if address not in exact_a.taps]
    return Walked(taps, dtypes, (exact_a, exact_b), missing)


def layers_before(address: str, depth: int) -> int:
    """How many layers lie before an address, itself counted; all of them before what stands behind."""
    layer = layer_of(address)
    if layer in ("embed", "head"):
        return 0 if layer == "embed" else depth
    return int(layer.rpartition(".")[2]) + (not address.endswith(f"{layer}.in"))


def _alike(x: Tensor, y: Tensor, prompt: Prompt) -> tuple[Tensor, Tensor] | None:
    """Both with one row a token; None where they are not of one shape."""
    shape = (prompt.batch, prompt.n)
    x, y = rows_of(x, *shape), rows_of(y, *shape)
    return (x.to(EXACT), y.to(EXACT)) if x.shape == y.shape else None


def scale(y: Tensor) -> float:
    """The root mean square length of a row; 1 where all are zero."""
    size = y.reshape(-1, y.shape[-1]).square().sum(-1).mean().sqrt().item()
    return size if size > 0 else 1.0


def gap(x: Tensor, y: Tensor, size: float) -> float:
    """How far the worst row is off, in units of `size`; infinite where one side alone has no number."""
    both = torch.isfinite(x) & torch.isfinite(y)
    alike = both | ((x == y) | (x.isnan() & y.isnan()))
    if not bool(alike.all()):
        return float("inf")
    apart = torch.where(both, x - y, torch.zeros_like(x))
    return apart.reshape(-1, apart.shape[-1]).square().sum(-1).amax().sqrt().item() / size
