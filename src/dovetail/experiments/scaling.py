"""Scaling laws: the loss as a function of parameters and tokens, fitted to runs, with intervals, and never far beyond them.

    L(N, D) = E + A / N^α + B / D^β                                          Hoffmann et al. 2022 (Chinchilla), approach 3
    min Σ Huber( log L̂(Nᵢ, Dᵢ) − log Lᵢ ),   δ = 10⁻³                        by BFGS from many starts
    C = 6 N D:   N* = G (C/6)^(β/(α+β)),  D* = (C/6) / N*,  G = (αA / βB)^(1/(α+β))

The sum of squares would follow outliers, and the mean of the Huber losses in place of the sum ended the published fit too early
(Besiroglu et al. 2024, who corrected it: E 1.8172, A 482.01, B 2085.43, α 0.3478, β 0.3658; a test repeats that). Intervals are
bootstrapped: the fit is repeated on resampled runs. A power law that holds over the runs says little far from them: an answer
beyond ten times the compute of the largest run is refused.
"""

from __future__ import annotations

import csv
import dataclasses as dc
import io
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dovetail.base.errors import DovetailError, FileError, install_command
from dovetail.disk.untrusted import read_regular
from dovetail.experiments.results import TUNING_SEED
from dovetail.spec.fold import parameters
from dovetail.training.record import find_runs, read_record

DELTA = 1e-3  # of the Huber loss, on logarithms
FLOPS_PER_PARAMETER = 6  # and token, of training
REACH = 10  # times the compute of the largest run, beyond which no answer is given
LEAST = 6  # runs: there are five numbers to fit
SIZES = 3  # different numbers of parameters, and of tokens
REFINED = 16  # starts that are followed to their minimum
CSV_BYTES = 1 << 24
Array = np.ndarray[Any, np.dtype[np.float64]]


class BeyondReach(DovetailError):
    """A budget far beyond the runs of a fit."""


class SizedRun(NamedTuple):
    """A run: its parameters, the tokens that it was trained on, its loss in nats per token."""

    parameters: float
    tokens: float
    loss: float

    @property
    def flops(self) -> float:
        """Its compute, 6 N D."""
        return FLOPS_PER_PARAMETER * self.parameters * self.tokens


class ScalingLaw(NamedTuple):
    """The five numbers."""

    E: float
    A: float
    B: float
    alpha: float
    beta: float

    def loss(self, size: float, tokens: float) -> float:
        """L(N, D)."""
        return float(self.E + self.A * size**-self.alpha + self.B * tokens**-self.beta)

    def optimal(self, flops: float) -> tuple[float, float]:
        """The parameters and tokens of the lowest loss at a compute."""
        g = (self.alpha * self.A / (self.beta * self.B)) ** (1 / (self.alpha + self.beta))
        size = g * (flops / FLOPS_PER_PARAMETER) ** (self.beta / (self.alpha + self.beta))
        return size, flops / FLOPS_PER_PARAMETER / size


class Estimate(NamedTuple):
    """A number with its interval."""

    value: float
    low: float
    high: float


@dc.dataclass(frozen=True)
class ScalingFit:
    """A law with the laws that resampled runs give."""

    law: ScalingLaw
    resampled: tuple[ScalingLaw, ...]
    runs: tuple[SizedRun, ...]
    level: float = 0.95

    def estimate(self, of: Any) -> Estimate:
        """The value of a function of the law, with its interval."""
        values = [of(law) for law in self.resampled]
        low, high = np.quantile(values, [(1 - self.level) / 2, (1 + self.level) / 2])
        return Estimate(of(self.law), float(low), float(high))

    def numbers(self) -> dict[str, Estimate]:
        """The numbers of the law."""
        return {name: self.estimate(lambda law, i=i: law[i]) for i, name in enumerate(ScalingLaw._fields)}

    def at(self, flops: float) -> dict[str, Estimate]:
        """The best parameters, tokens and loss at a compute. Raises BeyondReach far from the runs."""
        self.check_reach(flops)
        return {
            "parameters": self.estimate(lambda law: law.optimal(flops)[0]),
            "tokens": self.estimate(lambda law: law.optimal(flops)[1]),
            "loss": self.estimate(lambda law: law.loss(*law.optimal(flops))),
        }

    def predict(self, size: float, tokens: float) -> Estimate:
        """The loss of one more run, whose interval has the spread of the runs around the law, too."""
        self.check_reach(FLOPS_PER_PARAMETER * size * tokens)
        draw = np.random.default_rng(0)
        left = [np.log(run.loss / self.law.loss(run.parameters, run.tokens)) for run in self.runs]
        noise = dict(zip(self.resampled, np.exp(draw.choice(left, len(self.resampled))), strict=False))
        return self.estimate(lambda law: law.loss(size, tokens) * float(noise.get(law, 1.0)))

    def check_reach(self, flops: float) -> None:
        """Raise BeyondReach where a compute is more than ten times that of the largest run."""
        largest = max(run.flops for run in self.runs)
        if flops > REACH * largest:
            problem = f"{flops:.3g} FLOPs are more than {REACH} times the {largest:.3g} of the largest run"
            raise BeyondReach(f"{problem}; the law is not known to hold there; train a larger run first")

    def frontier(self, points: int = 9) -> list[dict[str, float]]:
        """The compute-optimal frontier, from the smallest run to the end of the reach: compute, parameters, tokens, loss."""
        computes = [run.flops for run in self.runs]
        budgets = np.geomspace(min(computes), REACH * max(computes), points)
        best = [(float(flops), *self.law.optimal(float(flops))) for flops in budgets]
        return [{"flops": f, "parameters": n, "tokens": d, "loss": self.law.loss(n, d)} for f, n, d in best]

    def to_dict(self) -> dict[str, Any]:
        """The fit as plain data."""
        numbers = {name: one._asdict() for name, one in self.numbers().items()}
        largest = max(run.flops for run in self.runs)
        return {
            "law": numbers,
            "runs": len(self.runs),
            "largest_flops": largest,
            "reach": REACH * largest,
            "frontier": self.frontier(),
        }


def fit_law(runs: Sequence[SizedRun], samples: int = 200, seed: int = 0) -> ScalingFit:
    """Fit the law to runs, and to `samples` resamplings of them."""
    if len(runs) < LEAST or min(len({run[i] for run in runs}) for i in (0, 1)) < SIZES:
        raise FileError(
            f"{len(runs)} runs cannot be fitted: five numbers need {LEAST}, with {SIZES} sizes and {SIZES} numbers of tokens"
        )
    data = np.log(np.array(runs, dtype=np.float64))
    start = _best(data, _starts(data))
    draw = np.random.default_rng(seed)
    resampled = (data[draw.integers(len(data), size=len(data))] for _ in range(samples))
    laws = tuple(_law(_minimized(sample, start)[1]) for sample in resampled)
    return ScalingFit(_law(start), laws, tuple(runs))


def _starts(data: Array) -> list[Array]:
    """Starts over the plausible range: exponents, the irreducible share of the lowest loss, and which term has the rest."""
    loss = np.exp(data[:, 2])
    found: list[Array] = []
    for alpha, beta, share, part in itertools.product(
        (0.1, 0.3, 0.6, 1.2), (0.1, 0.3, 0.6, 1.2), (0.3, 0.7, 0.95), (0.2, 0.5, 0.8)
    ):
        floor = share * loss.min()
        rest = loss.mean() - floor
        center = data.mean(0)
        found.append(
            np.array(
                [
                    np.log(part * rest) + alpha * center[0],
                    np.log((1 - part) * rest) + beta * center[1],
                    np.log(floor),
                    alpha,
                    beta,
                ]
            )
        )
    return found


def _best(data: Array, starts: list[Array]) -> Array:
    ranked = sorted(starts, key=lambda start: _objective(start, data)[0])[:REFINED]
    return min((_minimized(data, start) for start in ranked), key=lambda one: one[0])[1]


def _minimized(data: Array, start: Array) -> tuple[float, Array]:
    """(value, numbers) at the minimum from a start. The terms are moved to the mean run, so that they correlate less."""
    try:
        from scipy.optimize import minimize
    except ImportError:
        raise DovetailError(f"a fit needs scipy: {install_command('lab')}") from None
    center = data.mean(0)
    moved = data - [center[0], center[1], 0.0]
    shift = np.array([start[3] * center[0], start[4] * center[1], 0, 0, 0])
    found = minimize(_objective, start - shift, args=(moved,), jac=True, method="BFGS", options={"gtol": 1e-7, "maxiter": 2000})
    x = np.asarray(found.x, dtype=np.float64)
    return float(found.fun), x + np.array([x[3] * center[0], x[4] * center[1], 0, 0, 0])


def _objective(x: Array, data: Array) -> tuple[float, Array]:
    """The sum of the Huber losses and its gradient; x = (log A, log B, log E, α, β), data = (log N, log D, log L) per run."""
    terms = np.stack([x[0] - x[3] * data[:, 0], x[1] - x[4] * data[:, 1], np.full(len(data), x[2])])
    top = terms.max(0)
    weights = np.exp(terms - top)
    total = weights.sum(0)
    left = top + np.log(total) - data[:, 2]
    slope = np.clip(left / DELTA, -1, 1)  # of the Huber loss ÷ δ, so that its scale is 1
    value = np.where(np.abs(left) <= DELTA, 0.5 * (left / DELTA) ** 2, np.abs(left) / DELTA - 0.5).sum()
    shares = weights / total * slope / DELTA
    gradient = [*shares.sum(1), -(shares[0] * data[:, 0]).sum(), -(shares[1] * data[:, 1]).sum()]
    return float(value), np.array(gradient)


def _law(x: Array) -> ScalingLaw:
    return ScalingLaw(float(np.exp(x[2])), float(np.exp(x[0])), float(np.exp(x[1])), float(x[3]), float(x[4]))


# -- runs -------------------------------------------------------------------------------------------------------------

COLUMNS = ("parameters", "loss")


def read_sized_runs(source: str | Path) -> list[SizedRun]:
    """The runs in a CSV file with the columns parameters, loss, and tokens or training_flop; or those below a directory."""
    path = Path(source)
    return _from_runs(path) if path.is_dir() else _from_csv(path)


def _from_csv(path: Path) -> list[SizedRun]:
    rows = csv.DictReader(io.StringIO(read_regular(path, CSV_BYTES, "a table of runs")))
    names = rows.fieldnames or ()
    if any(name not in names for name in COLUMNS) or not {"tokens", "training_flop"} & set(names):
        raise FileError(f"{path}: its columns are {', '.join(names)[:80]}; give parameters, loss, and tokens or training_flop")
    found: list[SizedRun] = []
    for number, row in enumerate(rows, 2):
        try:
            size, loss = float(row["parameters"]), float(row["loss"])
            tokens = float(row["tokens"]) if "tokens" in names else float(row["training_flop"]) / FLOPS_PER_PARAMETER / size
        except (TypeError, ValueError, ZeroDivisionError):
            raise FileError(f"{path}: line {number}: is not three numbers") from None
        if not all(np.isfinite(value) and value > 0 for value in (size, tokens, loss)):
            raise FileError(f"{path}: line {number}: holds a number that is not above 0")
        found.append(SizedRun(size, tokens, loss))
    return found


def _from_runs(place: Path) -> list[SizedRun]:
    records = [record for run in find_runs([place]) if (record := read_record(run)).settings.get("seed", 0) < TUNING_SEED]
    found = [(record, record.held_out_loss) for record in records if record.state == "complete"]
    runs = [SizedRun(float(parameters(record.spec)), float(record.history[-1].tokens), loss) for record, loss in found if loss]
    if not runs:
        raise FileError(f"{place}: holds no complete run of `dovetail train` with a held-out loss")
    return runs
