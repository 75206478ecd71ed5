"""Compare two sides on one prompt, tap by tap, in the order of computation.

    gap     = max over tokens |aₜ − bₜ| / root mean square over tokens of |bₜ|, both in the dtype of the sides
    exact   = the same for their float64 runs
    own     = the distance of a side from its own float64 run

A gap that remains in float64 is structural: the sides compute two different functions. A gap that vanishes in float64 is
rounding. A tap with NaN or infinity on either side is non-finite, and is never equal to anything.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from dovetail.model import Model
from dovetail.verification.envelope import envelope
from dovetail.verification.match import Place, comparable, layer_of, rows_of, same_named
from dovetail.verification.prompt import Prompt
from dovetail.verification.record import Recording
from dovetail.verification.sides import Side, run

EXACT = torch.float64
Status = Literal["equal", "rounding", "structural", "non-finite"]
Progress = Callable[[str], None]  # takes a line that says what is running


def short(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


@dc.dataclass(frozen=True)
class Tap:
    """One compared activation."""

    address: str
    gap: float
    exact: float
    own_a: float
    own_b: float
    allowed: float  # the bound of `gap`
    allowed_exact: float  # the bound of `exact`
    nonfinite: str = ""  # which run holds NaN or infinity here: `A in float64`

    @property
    def status(self) -> Status:
        """The result at this tap."""
        if self.nonfinite:
            return "non-finite"
        if not self.exact <= self.allowed_exact:
            return "structural"
        return "equal" if self.gap <= self.allowed else "rounding"


@dc.dataclass
class Comparison:
    """Every compared tap in order, and the float64 recordings."""

    taps: list[Tap]
    dtypes: tuple[torch.dtype, torch.dtype]
    exact: tuple[Recording, Recording]
    missing: list[str]  # addresses that only one side has, or that have another shape on the other side

    @property
    def first(self) -> Tap | None:
        """The first tap at which the sides are not the same function, or are not finite."""
        return next((tap for tap in self.taps if tap.status in ("structural", "non-finite")), None)

    @property
    def first_rounding(self) -> Tap | None:
        """The first tap at which rounding exceeds its bound."""
        return next((tap for tap in self.taps if tap.status == "rounding"), None)

    @property
    def status(self) -> Status:
        """The result over all taps."""
        if self.first is not None:
            return self.first.status
        return "equal" if self.first_rounding is None else "rounding"


def compare_sides(
    a: Side, b: Side, prompt: Prompt, *, dtype: torch.dtype | None = None, progress: Progress = lambda line: None
) -> Comparison:
    """Run both sides in their dtype and in float64, and compare the taps that both have."""
    spec = a.spec or b.spec
    dtypes = (dtype or a.dtype, dtype or b.dtype)
    sizes = {} if spec is None else comparable(spec)
    recordings = []
    for run_dtypes in ((EXACT, EXACT), dtypes):
        for side, run_dtype in zip((a, b), run_dtypes, strict=True):
            progress(f"{side.label}, {short(run_dtype)}")
            recordings.append(run(side, prompt, run_dtype, _places(a, b, side, spec), sizes))
    return compare_recordings(recordings[0], recordings[1], recordings[2], recordings[3], prompt, dtypes)


def _places(a: Side, b: Side, side: Side, spec: Model | None) -> Callable[[nn.Module], Sequence[Place]]:
    if spec is not None:
        return lambda module: side.places(module, spec)
    other = b if side is a else a
    return lambda module: same_named(module, other.module(other.dtype))


def compare_recordings(
    exact_a: Recording,
    exact_b: Recording,
    own_a: Recording,
    own_b: Recording,
    prompt: Prompt,
    dtypes: tuple[torch.dtype, torch.dtype],
) -> Comparison:
    """Compare the taps that both sides have, in the order of the first side."""
    taps, missing = [], []
    depth = len({layer_of(address) for address in exact_a.taps} - {"embed", "head"})
    for address in exact_a.taps:
        source = exact_a.alias.get(address)
        if source is not None and exact_b.alias.get(address) == source:
            continue  # both sides pass on a tensor that was compared at its source
        runs = [_token_rows(recording, address, prompt) for recording in (exact_a, exact_b, own_a, own_b)]
        if any(x is None or x.shape != runs[0].shape for x in runs if runs[0] is not None) or runs[0] is None:
            missing.append(address)
            continue
        limits = envelope(dtypes, layers_before(address, depth))
        taps.append(_tap(address, [x for x in runs if x is not None], dtypes, limits.rounding, limits.exact))
    missing += [address for address in exact_b.taps if address not in exact_a.taps]
    return Comparison(taps, dtypes, (exact_a, exact_b), missing)


def _token_rows(recording: Recording, address: str, prompt: Prompt) -> Tensor | None:
    """The activation in float64 with one row per token, where it has that form."""
    x = recording.taps.get(address)
    return None if x is None else rows_of(x, prompt.batch, prompt.n).to(EXACT)


def _tap(
    address: str, runs: Sequence[Tensor], dtypes: tuple[torch.dtype, torch.dtype], allowed: float, allowed_exact: float
) -> Tap:
    """One tap from its four runs: A and B in float64, A and B in their dtype."""
    exact_a, exact_b, own_a, own_b = runs
    scale = row_scale(exact_b)
    pairs = ((own_a, own_b), (exact_a, exact_b), (own_a, exact_a), (own_b, exact_b))
    gap, exact, distance_a, distance_b = (relative_gap(x, y, scale) for x, y in pairs)
    nonfinite = next(_nonfinite(runs, dtypes), "")
    return Tap(address, gap, exact, distance_a, distance_b, allowed, allowed_exact, nonfinite)


def _nonfinite(runs: Sequence[Tensor], dtypes: tuple[torch.dtype, torch.dtype]) -> Iterator[str]:
    """The runs that hold NaN or infinity, float64 first."""
    for x, letter, dtype in zip(runs, "ABAB", (EXACT, EXACT, *dtypes), strict=True):
        if not bool(x.isfinite().all()):
            yield f"{letter} in {short(dtype)}"


def layers_before(address: str, depth: int) -> int:
    """The number of layers before an address, including its own; all `depth` layers for the last norm and the head."""
    layer = layer_of(address)
    if layer in ("embed", "head"):
        return 0 if layer == "embed" else depth
    return int(layer.rpartition(".")[2]) + (not address.endswith(f"{layer}.in"))


def row_scale(y: Tensor) -> float:
    """The root mean square norm of a row; 1 where all rows are zero or the norm is not finite."""
    scale = y.reshape(-1, y.shape[-1]).square().sum(-1).mean().sqrt().item()
    return scale if 0 < scale < float("inf") else 1.0


def relative_gap(x: Tensor, y: Tensor, scale: float) -> float:
    """The largest distance of two rows, in units of `scale`; infinite where either side is not finite."""
    if not bool(x.isfinite().all() and y.isfinite().all()):
        return float("inf")
    return (x - y).reshape(-1, x.shape[-1]).square().sum(-1).amax().sqrt().item() / scale
