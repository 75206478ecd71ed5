"""Compare two sides on one prompt, tap by tap, in the order of computation.

    gap     = max over tokens |aₜ − bₜ| / root mean square over tokens of |bₜ|, both in the dtype of the sides
    typical = the same with the median over tokens
    exact   = the same for their float64 runs
    own     = the distance of a side from its own float64 run

A gap that remains in float64 is structural: the sides compute two different functions. A gap that vanishes in float64 is
rounding. A tap with NaN or infinity on either side is non-finite, and is never equal to anything.

In a narrow dtype a router with two nearly equal scores may choose another expert than in float64: from there on the token, and
in later layers every token that attends to it, is far from its float64 run on one side. Such tokens are excused from the bound
on rounding, and counted; in float64 they are compared like all others.

Two clean implementations of one model stay inside these bounds. In float64 the bound is fixed:
EXACT_GAP · (1 + layers before the tap).

In the dtype of the sides it is estimated at each tap from the distance of each side to its own float64 run (`own`). Massive
channels and cancellation enlarge the error of both sides alike, and how much is a property of the weights; so one side may
round a few times worse than the better one, by the typical (median) token, and many times worse at its worst token, where
single roundings decide:

    median gap ≤ TYPICAL · (min(median own) + floor)          floor = eps · (1 + layers before the tap)
    max gap    ≤ WORST · (min(max own) + floor)

`python benchmarks/envelope.py` measures both ratios on clean pairs of all families and fails where a bound is too small.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from dovetail.nn.finite import nonfinite
from dovetail.proof.compare.match import MatchedModule, comparable, layer_of, rows_of, same_named
from dovetail.proof.compare.prompt import Prompt
from dovetail.proof.compare.record import Recording
from dovetail.proof.compare.sides import Places, Side, run

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
    typical: float
    exact: float
    own_a: float
    own_b: float
    allowed: float  # the bound of `gap`
    allowed_typical: float  # the bound of `typical`
    allowed_exact: float  # the bound of `exact`
    nonfinite: str = ""  # which run holds NaN or infinity here: `A in float64`
    excused: int = 0  # tokens that a router sent to another expert than in float64

    @property
    def status(self) -> Status:
        """The result at this tap."""
        if self.nonfinite:
            return "non-finite"
        if not self.exact <= self.allowed_exact:
            return "structural"
        return "equal" if self.gap <= self.allowed and self.typical <= self.allowed_typical else "rounding"


TYPICAL, WORST = 4.0, 100.0
EXACT_GAP = 1e-10


class Envelope(NamedTuple):
    """The bounds of the median and the largest gap in the dtype of the sides, and of the largest gap in float64."""

    typical: float
    worst: float
    exact: float


def envelope(
    dtypes: tuple[torch.dtype, torch.dtype], layers: int, typical: tuple[float, float], worst: tuple[float, float]
) -> Envelope:
    """The bounds of a tap with `layers` layers before it; `typical` and `worst` are the distances of both sides from their own
    float64 runs, at the median and at the worst token."""
    floor = max(torch.finfo(dtype).eps for dtype in dtypes) * (1 + layers)  # a side may happen to be exact; the coarser counts
    return Envelope(TYPICAL * (min(typical) + floor), WORST * (min(worst) + floor), EXACT_GAP * (1 + layers))


@dc.dataclass
class SideComparison:
    """Every compared tap in order, and the recordings in float64 and in the dtype of the sides."""

    taps: list[Tap]
    dtypes: tuple[torch.dtype, torch.dtype]
    exact: tuple[Recording, Recording]
    own: tuple[Recording, Recording]
    missing: list[str]  # addresses that only one side has, or that have another shape on the other side
    flips: tuple[int, int] = (0, 0)  # choices of routers that differ from the float64 run, of A and B

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
    a: Side,
    b: Side,
    prompt: Prompt,
    *,
    dtype: torch.dtype | None = None,
    layers_only: bool = False,
    progress: Progress = lambda line: None,
) -> SideComparison:
    """Run both sides in their dtype and in float64, and compare the taps that both have; with `layers_only`, those of whole
    layers and the output."""
    spec = a.spec or b.spec
    dtypes = (dtype or a.dtype, dtype or b.dtype)
    sizes = {} if spec is None else comparable(spec)
    recordings = []
    for run_dtypes in ((EXACT, EXACT), dtypes):
        for side, run_dtype in zip((a, b), run_dtypes, strict=True):
            progress(f"{side.label}, {short(run_dtype)}")
            recordings.append(run(side, prompt, run_dtype, places_of(a, b, side, layers_only=layers_only), sizes))
    causal = spec is None or spec.order() == "causal"
    return compare_recordings((recordings[0], recordings[1]), (recordings[2], recordings[3]), prompt, dtypes, causal=causal)


def places_of(a: Side, b: Side, side: Side, *, layers_only: bool = False) -> Places:
    """The places of a side that are recorded when A and B are compared."""
    spec = a.spec or b.spec
    other = b if side is a else a

    def places(module: nn.Module) -> Sequence[MatchedModule]:
        found = same_named(module, other.module(other.dtype)) if spec is None else side.places(module, spec)
        return [place for place in found if place.layer or place.choices] if layers_only else found

    return places


def compare_recordings(
    exact: tuple[Recording, Recording],
    own: tuple[Recording, Recording],
    prompt: Prompt,
    dtypes: tuple[torch.dtype, torch.dtype],
    *,
    causal: bool = True,
) -> SideComparison:
    """Compare the taps that both sides have, in the order of the first side."""
    taps, missing = [], []
    exact_a, exact_b = exact
    flips = [router_flips(*pair) for pair in zip(exact, own, strict=True)]
    depth = len({layer_of(address) for address in exact_a.taps} - {"embed", "head"})
    for address in exact_a.taps:
        source = exact_a.alias.get(address)
        if source is not None and exact_b.alias.get(address) == source:
            continue  # both sides pass on a tensor that was compared at its source
        found = [_token_rows(recording, address, prompt) for recording in (*exact, *own)]
        runs = [x for x in found if x is not None]
        if len(runs) < len(found) or len({x.shape for x in runs}) > 1:
            missing.append(address)
            continue
        excused = excused_tokens(flips, address, prompt, causal=causal)
        taps.append(_tap(address, runs, dtypes, layers_before(address, depth), excused))
    missing += [address for address in exact_b.taps if address not in exact_a.taps]
    counts = [sum(int(flipped.sum()) for flipped in side.values()) for side in flips]
    return SideComparison(taps, dtypes, exact, own, missing, (counts[0], counts[1]))


Flips = dict[str, Tensor]  # by the path of a router: (batch · n,) true where the choice differs from the float64 run


def router_flips(exact: Recording, own: Recording) -> Flips:
    """The tokens that a side's routers send to other experts than in its float64 run."""
    return {
        path: (chosen != own.choices[path]).any(-1)
        for path, chosen in exact.choices.items()
        if path in own.choices and own.choices[path].shape == chosen.shape
    }


def excused_tokens(flips: Sequence[Flips], address: str, prompt: Prompt, *, causal: bool) -> Tensor:
    """(batch · n,) true for tokens at an address that a flipped choice of a router reaches. A flip acts on its token behind the
    router, and in later layers on the tokens after it (on the whole row, where attention is not causal). Where only one side
    shows its choices, all tokens behind the router count as reached."""
    reached = torch.zeros(prompt.batch, prompt.n, dtype=torch.bool)
    here = _order(layer_of(address))
    for path in dict.fromkeys(path for side in flips for path in side):
        there, branch = _order(layer_of(path)), path.rpartition(".")[0]
        behind = here > there or address == layer_of(path) or address.startswith(f"{branch}.") or address == branch
        if not behind:
            continue
        shown = [side[path] for side in flips if path in side and side[path].numel() == reached.numel()]
        if len(shown) < len(flips):
            return torch.ones_like(reached).flatten()
        flipped = torch.stack(shown).any(0).view_as(reached)
        if here > there:
            flipped = flipped.cummax(1).values if causal else flipped.any(1, keepdim=True).expand_as(flipped)
        reached |= flipped
    return reached.flatten()


def _order(layer: str) -> tuple[int, int]:
    """Layers in the order of computation: embedding, encoder, decoder, head."""
    if layer in ("embed", "head"):
        return (0, 0) if layer == "embed" else (3, 0)
    return (1 if layer.startswith("encoder.") else 2, int(layer.rpartition(".")[2]))


def _token_rows(recording: Recording, address: str, prompt: Prompt) -> Tensor | None:
    """The activation in float64 with one row per token, where it has that form."""
    x = recording.taps.get(address)
    return None if x is None else rows_of(x, prompt.batch, prompt.n).to(EXACT)


def _tap(address: str, runs: Sequence[Tensor], dtypes: tuple[torch.dtype, torch.dtype], layers: int, excused: Tensor) -> Tap:
    """One tap from its four runs: A and B in float64, A and B in their dtype."""
    exact_a, exact_b, own_a, own_b = runs
    scale = row_scale(exact_b)
    exact, culprit = relative_gap(exact_a, exact_b, scale), next(_nonfinite(runs, dtypes), "")
    applies = exact_a.shape[:1] == excused.shape and bool(excused.any())
    compared = [x[~excused] for x in runs] if applies else runs
    exact_a, exact_b, own_a, own_b = compared
    pairs = ((own_a, own_b), (own_a, exact_a), (own_b, exact_b))
    gap, worst_a, worst_b = (relative_gap(x, y, scale) for x, y in pairs)
    typical, typical_a, typical_b = (relative_gap(x, y, scale, median=True) for x, y in pairs)
    limits = envelope(dtypes, layers, (typical_a, typical_b), (worst_a, worst_b))
    count = int(excused.sum()) if applies else 0
    bounds = (limits.worst, limits.typical, limits.exact)
    return Tap(address, gap, typical, exact, worst_a, worst_b, *bounds, nonfinite=culprit, excused=count)


def _nonfinite(runs: Sequence[Tensor], dtypes: tuple[torch.dtype, torch.dtype]) -> Iterator[str]:
    """The runs that hold NaN or infinity, float64 first."""
    for x, letter, dtype in zip(runs, "ABAB", (EXACT, EXACT, *dtypes), strict=True):
        if nonfinite(x):
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


def relative_gap(x: Tensor, y: Tensor, scale: float, *, median: bool = False) -> float:
    """The largest (or median) distance of two rows, in units of `scale`; infinite where either side is not finite."""
    if nonfinite(x) or nonfinite(y):
        return float("inf")
    if not x.numel():
        return 0.0
    distance = (x - y).reshape(-1, x.shape[-1]).norm(dim=-1)
    return (distance.median() if median else distance.amax()).item() / scale
