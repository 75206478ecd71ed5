"""Fit temperature and truncation to the sampler's log-probs s.

    minimize over T, k, p, m      mean min((s − log q)², 1)         q as in sampling.py

The bound of 1 nat keeps a few tokens from deciding. Values are looked for on a grid of round numbers first (people set round
numbers), then between its points. A setting with more parameters must fit clearly better than one with fewer.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from dovetail.proof.rollouts.sampling import RAW, RankedLogits, Settings, Tempered

TEMPERATURES = (*(i / 20 for i in range(2, 41)), 2.5, 3.0, 4.0, 5.0)
TOP_P = (*(i / 100 for i in range(1, 100)), 0.995, 0.999)
MIN_P = tuple(sorted({round(m / 2 * 10.0**-e, 6) for e in range(1, 5) for m in range(2, 20)}))
TOP_K = (2, 5, 8, 10, 16, 20, 25, 30, 32, 40, 50, 64, 100, 128, 200, 256)  # tried together with top_p
MOST_K = 4096
OUTSIDE = 0.05  # the largest fraction of sampled tokens that a rule may contradict
BETTER = 0.8  # a setting with one parameter more must reduce the error to this fraction,
FIRST = 0.95  # and the first parameter to this one
FIT_VALUES, LEAST_TOKENS = 2**22, 256  # of the logits that a fit reads
GOLDEN, STEPS = 0.618033988749895, 30


def size(residual: Tensor) -> float:
    """The root of the mean square, each at most 1 nat."""
    return residual.square().clamp(max=1.0).mean().sqrt().item()


@dc.dataclass(frozen=True)
class Fit:
    """Settings and the size of what they leave."""

    settings: Settings
    error: float


def fit_settings(ranked: RankedLogits, logprobs: Tensor, recorded: Sequence[Settings] = (), *, floor: float) -> Fit:
    """The simplest settings that explain the log-probs (n,), at best down to `floor`."""
    ranked, logprobs = _some(ranked, logprobs)
    best = Fit(RAW, size(logprobs - ranked.tempered(1.0).own))
    for stage in (_recorded, _single, _tempered_rule, _two_rules):
        if best.error <= floor:
            break
        for fit in stage(ranked, logprobs, recorded, best, floor):
            if fit.error < (FIRST if best.settings == RAW else BETTER) * max(best.error, floor):
                best = fit
    return best


Stage = Callable[[RankedLogits, Tensor, Sequence[Settings], Fit, float], Iterator[Fit]]


def _recorded(ranked: RankedLogits, s: Tensor, recorded: Sequence[Settings], best: Fit, floor: float) -> Iterator[Fit]:
    for settings in dict.fromkeys(recorded):
        for one in (Settings(temperature=settings.temperature), dc.replace(settings, temperature=1.0), settings):
            yield Fit(one, size(s - ranked.tempered(one.temperature).logprob(one)))


def _single(ranked: RankedLogits, s: Tensor, recorded: Sequence[Settings], best: Fit, floor: float) -> Iterator[Fit]:
    """One parameter: the best of temperature and the three rules."""
    raw = ranked.tempered(1.0)
    yield min([fit_temperature(ranked, s, floor), *_rules(raw, s, RAW, floor)], key=lambda fit: fit.error)


def fit_temperature(ranked: RankedLogits, s: Tensor, floor: float) -> Fit:
    """The temperature that leaves least."""

    def fit(temperature: float) -> Fit:
        settings = dc.replace(RAW, temperature=temperature)
        return Fit(settings, size(s - ranked.tempered(temperature).logprob(settings)))

    return _along(fit, TEMPERATURES, floor)


def _along(fit: Callable[[float], Fit], grid: Sequence[float], floor: float) -> Fit:
    """The best fit over one number: on the grid, then by golden section beside its best point."""
    fits = [fit(value) for value in grid]
    i = min(range(len(grid)), key=lambda i: fits[i].error)
    if fits[i].error <= floor:
        return fits[i]
    low, high = grid[max(i - 1, 0)], grid[min(i + 1, len(grid) - 1)]
    return min([fits[i], _golden(fit, low, high)], key=lambda one: one.error)


class HasError(Protocol):
    """A fit of any kind."""

    @property
    def error(self) -> float: ...


AnyFit = TypeVar("AnyFit", bound=HasError)


def golden_section(fit: Callable[[float], AnyFit], low: float, high: float, steps: int, nearest: float = 0.0) -> AnyFit:
    """The best fit over one number between two others, at most `steps` times nearer, until they are `nearest` to each other."""
    a, b = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    at_a, at_b = fit(a), fit(b)
    for _ in range(steps):
        if at_a.error < at_b.error:
            high, b, at_b = b, a, at_a
            a = high - GOLDEN * (high - low)
            at_a = fit(a)
        else:
            low, a, at_a = a, b, at_b
            b = low + GOLDEN * (high - low)
            at_b = fit(b)
        if high - low < nearest:
            break
    return min(at_a, at_b, key=lambda one: one.error)


def _golden(fit: Callable[[float], Fit], low: float, high: float) -> Fit:
    best = golden_section(fit, low, high, STEPS)
    for digits in (1, 2, 3):  # a round number that fits as well
        near = fit(float(f"{best.settings.temperature:.{digits}g}"))
        if near.error <= best.error * 1.01:
            return near
    return best


def _rules(tempered: Tempered, s: Tensor, settings: Settings, floor: float) -> Iterator[Fit]:
    """The best value of each truncation rule at a temperature."""
    gap = s - tempered.own
    if size(gap.clamp(max=0.0)) > max(floor, 0.5 * size(gap)):
        return  # −log S is never negative, and much of the gap is
    most = min(tempered.logprobs.shape[1] - 1, MOST_K)
    counts = torch.arange(1, most + 1)
    yield _best(tempered, gap, counts.expand(len(gap), -1), [dc.replace(settings, top_k=int(k)) for k in counts])
    for rule, grid, finer in (("top_p", TOP_P, (1e-3, 1e-4)), ("min_p", MIN_P, (0.02, 0.002))):
        fit = _on_grid(tempered, gap, settings, rule, grid)
        for step in finer:
            if fit.error <= floor:
                break
            at = getattr(fit.settings, rule)
            near = [at * (1 + step * i) if rule == "min_p" else at + step * i for i in range(-12, 13)]
            values = [round(value, 6) for value in near if 0 < value < 1]
            fit = min(fit, _on_grid(tempered, gap, settings, rule, values), key=lambda one: one.error)
        rounded = sorted(
            {float(f"{getattr(fit.settings, rule):.{digits}g}") for digits in (1, 2, 3)}, key=lambda x: len(f"{x:g}")
        )
        near = (_on_grid(tempered, gap, settings, rule, [value]) for value in rounded if 0 < value < 1)
        yield next((one for one in near if one.error <= max(1.01 * fit.error, floor)), fit)


def _on_grid(tempered: Tempered, gap: Tensor, settings: Settings, rule: str, grid: Sequence[float]) -> Fit:
    """The best of several values of one rule; the other settings stay."""
    every = [dc.replace(settings, **{rule: value}) for value in grid]
    return _best(tempered, gap, tempered.kept_by(settings, rule, torch.tensor(grid, dtype=gap.dtype)), every)


def _best(tempered: Tempered, gap: Tensor, counts: Tensor, settings: Sequence[Settings]) -> Fit:
    """The best of several settings of one temperature, with the kept tokens (n, settings) of each."""
    mass = tempered.cumulative.gather(1, counts - 1)
    left_out = tempered.rank[:, None] >= counts
    mass = torch.where(left_out, mass + tempered.own.exp()[:, None], mass).clamp(max=1.0)
    errors = (gap[:, None] + mass.log()).square().clamp(max=1.0).mean(0).sqrt()
    errors = errors.masked_fill(left_out.double().mean(0) > OUTSIDE, float("inf"))
    i = int(errors.argmin())
    return Fit(settings[i], errors[i].item())


def _tempered_rule(ranked: RankedLogits, s: Tensor, recorded: Sequence[Settings], best: Fit, floor: float) -> Iterator[Fit]:
    """A temperature and one rule."""
    fits: list[Fit] = []
    for t in _temperatures(recorded):
        fits += _rules(ranked.tempered(t), s, Settings(t), floor)
        if fits and fits[-1].error <= floor:
            break
    if fits:
        yield _refined(ranked, s, min(fits, key=lambda fit: fit.error), floor)


def _two_rules(ranked: RankedLogits, s: Tensor, recorded: Sequence[Settings], best: Fit, floor: float) -> Iterator[Fit]:
    """top_k and top_p together, with a temperature; only where settings already explain most of the gap."""
    if best.settings == RAW or best.error > 0.5 * size(s - ranked.tempered(1.0).own):
        return
    fits: list[Fit] = []
    for t in _temperatures(recorded):
        tempered = ranked.tempered(t)
        gap = s - tempered.own
        if size(gap.clamp(max=0.0)) > max(floor, 0.5 * size(gap)):
            continue
        fits += [_on_grid(tempered, gap, Settings(t, top_k=k), "top_p", TOP_P[49:]) for k in TOP_K]
        if min(fit.error for fit in fits[-len(TOP_K) :]) <= floor:
            break
    if fits:
        yield _refined(ranked, s, min(fits, key=lambda one: one.error), floor)


def _refined(ranked: RankedLogits, s: Tensor, fit: Fit, floor: float) -> Fit:
    """The fit with a temperature between the points of the grid."""
    if fit.error <= floor:
        return fit
    low, high = fit.settings.temperature * 0.95, fit.settings.temperature * 1.05
    again = _golden(
        lambda t: Fit(one := dc.replace(fit.settings, temperature=t), size(s - ranked.tempered(t).logprob(one))), low, high
    )
    return min(fit, again, key=lambda one: one.error)


def _temperatures(recorded: Sequence[Settings]) -> list[float]:
    return sorted({*TEMPERATURES, *(settings.temperature for settings in recorded)})


def _some(ranked: RankedLogits, logprobs: Tensor) -> tuple[RankedLogits, Tensor]:
    """As many tokens as a fit reads, evenly taken, in float64 where that is small."""
    n, vocab = ranked.logits.shape
    count = min(n, max(LEAST_TOKENS, FIT_VALUES // vocab))
    rows = torch.arange(count) * n // count
    ranked = ranked[rows]
    dtype = torch.float64 if count * vocab <= FIT_VALUES else torch.float32
    return RankedLogits(ranked.logits.to(dtype), ranked.rank), logprobs[rows].to(dtype)
