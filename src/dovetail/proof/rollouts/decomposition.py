"""The parts of a gap and the verdict: what the explanation adds per token, and what it leaves, by its size and shape.

left ≤ 3 × the distance of the trainer's run from float64    batch shape: rounding in the trainer's dtype
left ≤ 3 × that of its bfloat16 run                          dtype: the sampler rounds more
more, larger for older `weights_version`                     staleness
more, larger at later positions                              structure
more                                                         unexplained
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Sequence

import torch
from torch import Tensor

from dovetail.proof.compare.comparison import short
from dovetail.proof.compare.sides import Side
from dovetail.proof.rollouts.explain import Component, Explanation, Search, components
from dovetail.proof.rollouts.file import Rollout
from dovetail.proof.rollouts.fit import size
from dovetail.proof.rollouts.logits import Sampled
from dovetail.proof.rollouts.sampling import RAW, Settings
from dovetail.proof.rollouts.verdict import (
    EQUAL,
    SAMPLING,
    STALE,
    GapCause,
    RolloutVerdict,
    ShownToken,
    Statistics,
    by_version,
    spearman,
)

ROOM = 3.0  # times the distance of a run from float64: the largest gap of rounding
WEAK, MUCH = 0.5, 0.25  # settings that explain less than WEAK, where more than MUCH is left, imitate another cause
FAR, FAR_TIMES = 1.0, 10.0  # nats, and times the largest size of rounding: a token that is further away is not rounding
GROWS, EVIDENCE = 0.25, 4.0  # rank correlation of what is left with the position, and times √n
AGES = 0.5  # the newest weights leave at most this fraction of what the oldest leave
NEVER = ("the sampler's own logits", "repetition penalties and other logit processors", "devices other than the CPU")


@dc.dataclass(frozen=True)
class RoundingSize:
    """The size of rounding: in the trainer's dtype, and in bfloat16."""

    own: float
    coarse: float

    @property
    def floor(self) -> float:
        """The largest gap of two batch shapes in the trainer's dtype."""
        return max(EQUAL, ROOM * self.own)

    @property
    def widest(self) -> float:
        """The largest gap of another dtype."""
        return max(self.floor, ROOM * self.coarse)


@dc.dataclass(frozen=True)
class VerdictContext:
    """What the verdict needs beside the explanation."""

    side: Side
    path: str
    rollouts: Sequence[Rollout]
    dtype: torch.dtype
    noise: RoundingSize
    trainer: Tensor  # log-probs of the sampled tokens
    tried: str  # architectures
    older: bool
    why: bool


def verdict_of(search: Search, best: Explanation, given: VerdictContext) -> RolloutVerdict:
    """The verdict: the components of the gap, and what is left by its size and shape."""
    sampled, notes = search.sampled, []
    gap, found, rest = components(search, best)
    if size(rest) > given.noise.widest and best.settings != RAW:
        total = gap.square().sum()
        explained = sum((one.values @ gap / total).item() for one in found if one.cause in SAMPLING)
        if explained < WEAK and (rest @ gap / total).item() > MUCH:
            best = dc.replace(best, settings=RAW)
            gap, found, rest = components(search, best)
    valid = sampled.pairs(best.alignment)[0]
    found = _merged([*found, *rest_of(sampled, valid, rest, given)])
    total = gap.square().sum().clamp(min=1e-30)
    causes = []
    for one in found:
        at = int(one.values.abs().argmax())
        place = int(valid.nonzero()[at])
        rollout = sampled.rollouts[int(sampled.rollout[place])]
        shown = ShownToken.of(rollout, int(sampled.position[place]), one.values[at].item(), given.trainer[place].item())
        share, mean_abs = (one.values @ gap / total).item(), one.values.abs().mean().item()
        causes.append(GapCause(one.cause, share, mean_abs, one.description, one.formula, shown))
    causes.sort(key=lambda cause: -cause.share)
    if len(sampled.rollouts) < len(given.rollouts):
        used = f"{len(sampled.rollouts)} of {len(given.rollouts)} rollouts were used"
        notes.append(f"{used}: their logits fill the memory allowed")
    notes += trainer_notes(sampled, given)
    notes += raw_notes(best, sampled)
    skipped = [] if given.older else ["older weights (give --older DIR)"]
    skipped += [] if given.why else ["other architectures (--no-why)"]
    tested = ["shift by one", "temperature, top_k, top_p, min_p", "dtypes"] + (["older weights"] if given.older else [])
    return RolloutVerdict(
        a=given.side.label,
        b=given.path,
        dtype=short(given.dtype),
        rollouts=len(given.rollouts),
        tokens=sum(sum(one.sampled) for one in given.rollouts),
        explained=len(sampled),
        statistics=Statistics.of(sampled.logprobs, given.trainer),
        causes=causes,
        settings=str(best.settings),
        contradictions=contradictions(best.settings, sampled.rollouts),
        tested="; ".join([*tested, *([given.tried] if given.tried else [])]),
        not_tested="; ".join([*skipped, *NEVER]),
        notes=notes,
    )


def _merged(found: list[Component]) -> list[Component]:
    """Components of one cause as one."""
    merged: dict[str, Component] = {}
    for one in found:
        before = merged.get(one.cause)
        merged[one.cause] = one if before is None else dc.replace(before, values=before.values + one.values)
    return list(merged.values())


def rest_of(sampled: Sampled, valid: Tensor, rest: Tensor, given: VerdictContext) -> list[Component]:
    """What the explanation leaves: rounding by its size, and what is more than that."""
    noise, left = given.noise, size(rest)
    formula, far = "s − log q", rest.abs() > max(FAR, FAR_TIMES * given.noise.widest)
    if left <= noise.widest or bool(far.any() and size(rest[~far]) <= noise.widest):
        near = rest.masked_fill(far, 0.0)
        if size(near) <= noise.floor:
            text = f"rounding of {short(given.dtype)}: batch shape, kernels, cached decoding; its size here is {noise.own:.1e}"
            result = [Component("batch shape", text, formula, near)]
        else:
            text = f"the sampler rounds as bfloat16 does, whose size here is {noise.coarse:.1e}"
            result = [Component("dtype", text, formula, near)]
        if bool(far.any()):
            text = f"{int(far.sum())} of {len(rest)} tokens are far from what explains the others"
            result.append(Component("unexplained", text, formula, rest - near))
        return result
    rounding = rest.clamp(-noise.floor, noise.floor)
    more = rest - rounding
    cause, text = beyond(sampled, valid, more)
    small = Component("batch shape", f"rounding of {short(given.dtype)}", formula, rounding)
    return [small, Component(cause, text, formula, more)]


def beyond(sampled: Sampled, valid: Tensor, rest: Tensor) -> tuple[str, str]:
    """Name what no candidate explains by its shape: it grows with the age of the weights, with the position, or neither."""
    versions, rollout = by_version(sampled.rollouts), sampled.rollout[valid]
    if len(versions) > 1:
        ages = [versions[::-1].index(one.version) if one.version is not None else -1 for one in sampled.rollouts]
        age = torch.tensor(ages)[rollout]
        known = age >= 0
        means = [rest.abs()[age == i].mean().item() for i in range(len(versions)) if bool((age == i).any())]
        correlation = spearman(torch.arange(len(means)).double(), torch.tensor(means)) if len(means) > 2 else 1.0
        if bool(known.any()) and len(means) > 1 and means[0] <= AGES * means[-1] and correlation > 0:
            shown = ", ".join(f"{v}: {m:.2g}" for v, m in zip(versions[::-1], means, strict=False))
            return STALE, f"what is left grows with the age of weights_version ({shown})"
    position = sampled.position[valid]
    grows = spearman(position.double(), rest.abs())
    if grows >= GROWS and grows * len(rest) ** 0.5 >= EVIDENCE:
        return "structure", f"what is left grows with the position (rank correlation {grows:.2f}): rope, window, positions"
    return "unexplained", "no candidate explains it"


def contradictions(settings: Settings, rollouts: Sequence[Rollout]) -> list[str]:
    """Settings that the file records and the fit contradicts. A sampler may report log-probs before any of them."""
    recorded = {rollout.settings for rollout in rollouts}
    if len(recorded) != 1 or (said := recorded.pop()) is None:
        return []
    result = []
    for name in ("temperature", "min_p", "top_k", "top_p"):
        fitted, given = getattr(settings, name), getattr(said, name)
        neutral = getattr(RAW, name)
        if fitted != neutral and (given == neutral or abs(fitted - given) > 0.05 * abs(given)):
            text = "none" if given is None else f"{given:g}"
            result.append(f"the file records {name} {text}, and the log-probs are those of {name} {fitted:.4g}")
    return result


def raw_notes(best: Explanation, sampled: Sampled) -> list[str]:
    """A note where a temperature is recorded, and the log-probs are those before it."""
    recorded = {rollout.settings.temperature for rollout in sampled.rollouts if rollout.settings is not None} - {1.0}
    if not recorded or best.settings.temperature != 1:
        return []
    shown = ", ".join(f"{t:g}" for t in sorted(recorded))
    return [f"the file records temperature {shown}, and the log-probs are those before temperature"]


def trainer_notes(sampled: Sampled, given: VerdictContext) -> list[str]:
    """A note where the file holds the trainer's own log-probs and the model does not give them."""
    places = zip(sampled.rollout.tolist(), sampled.position.tolist(), strict=True)
    rows = [(k, trainer[j]) for k, (i, j) in enumerate(places) if (trainer := sampled.rollouts[i].trainer) is not None]
    if not rows:
        return []
    at, values = torch.tensor([k for k, _ in rows]), torch.tensor([x for _, x in rows], dtype=torch.float64)
    apart = size(given.trainer[at] - values)
    close = apart <= given.noise.widest
    text = "are those of the model up to rounding" if close else "are not those of the model, which is another one"
    return [f"the trainer's log-probs in the file {text} (root mean square {apart:.1e})"]
