"""Explain rollouts: the sampler's log-probs in a file against the trainer's model.

1. The model runs on the rollouts in its own dtype, in float64 and in bfloat16: the distances are the size of rounding.
2. Shift, dtype, older weights, temperature and truncation are searched (explain.py).
3. What is left and larger than rounding: another architecture with the same weights (structure.py).
4. What is still left: staleness where it grows with the age of `weights_version`; structure where it grows with the position;
   else it is unexplained.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Sequence

import torch
from torch import Tensor

from dovetail.core.errors import FileError
from dovetail.verification.comparison import EXACT, Progress, short
from dovetail.verification.rollouts.explain import Component, Explanation, Search, Source, components
from dovetail.verification.rollouts.file import Rollout
from dovetail.verification.rollouts.fit import size
from dovetail.verification.rollouts.logits import (
    Sampled,
    check_rollouts,
    logit_rows,
    side_logprobs,
    some_rollouts,
    stored_logits,
)
from dovetail.verification.rollouts.sampling import RAW, Settings
from dovetail.verification.rollouts.structure import find_variant
from dovetail.verification.rollouts.verdict import (
    EQUAL,
    STALE,
    GapCause,
    RolloutVerdict,
    ShownToken,
    Statistics,
    by_version,
    spearman,
)
from dovetail.verification.sides import ModelSide, Side, in_dtype

ROOM = 3.0  # times the distance of a run from float64: the largest gap of rounding
HALF = 0.5  # a variant of the architecture leaves at most this fraction of the gap
WEAK, MUCH = 0.5, 0.25  # settings that explain less than WEAK, where more than MUCH is left, imitate another cause
STRUCTURE_SECONDS, STRUCTURE_TOKENS = 120.0, 1024
GROWS, EVIDENCE, AGES = 0.25, 4.0, 0.5  # rank correlations of what is left with position (times √n) and with age
NEVER = ("the sampler's own weights and logits", "repetition penalties and other logit processors", "devices other than the CPU")


@dc.dataclass(frozen=True)
class Noise:
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


def explain_rollouts(
    side: Side,
    path: str,
    rollouts: Sequence[Rollout],
    *,
    older: Sequence[Side] = (),
    dtype: torch.dtype | None = None,
    why: bool = True,
    progress: Progress = lambda line: None,
) -> RolloutVerdict:
    """Explain the gap between the log-probs of rollouts and those of a side; `older` are earlier checkpoints of it."""
    for one in (side, *older):
        check_rollouts(one, rollouts, path)
    dtype = dtype or side.dtype
    progress(f"{side.label}, {short(dtype)}")
    vocab = next(logit_rows(side, rollouts[:1], dtype))[1].shape[1]
    some = Sampled(some_rollouts(rollouts, vocab))
    own = stored_logits(side, some, dtype)
    check_vocabulary(rollouts, vocab, path)
    trainer = some.target_logprobs(own)
    progress(f"{side.label}, float64 and bfloat16")
    exact, coarse = side_logprobs(side, some, EXACT), stored_logits(side, some, torch.bfloat16)
    noise = Noise(size(trainer - exact), size(some.target_logprobs(coarse) - exact))
    recorded = [one.settings for one in some.rollouts if one.settings is not None]
    search = Search(some, own, recorded, noise.floor)
    progress("searching for the causes")
    gap = size(some.logprobs - trainer)
    sources = dtype_sources(side, some, dtype, coarse, exact, gap, noise)
    sources += older_sources(older, some, own, search)
    best, tried = search.run(sources), ""
    left = search.left(best)
    if why and left > noise.floor and best.source.cause not in ("dtype", STALE):
        progress("searching for another architecture")
        best, tried = with_structure(search, side, best)
    return verdict_of(search, best, Context(side, path, rollouts, dtype, noise, trainer, tried, bool(older), why))


def check_vocabulary(rollouts: Sequence[Rollout], vocab: int, path: str) -> None:
    """Raise for a token that has no logit."""
    for one in rollouts:
        if max(one.tokens) >= vocab:
            raise FileError(f"{path}:{one.line}: token {max(one.tokens)} is beyond the {vocab} logits of the model")


def dtype_sources(
    side: Side, sampled: Sampled, own: torch.dtype, coarse: Tensor, exact: Tensor, gap: float, noise: Noise
) -> list[Source]:
    """The model in other dtypes. One that rounds less than the trainer counts only where it leaves next to nothing: against
    any sampler that rounds, an exact run is nearer than another rounded one."""
    found = []
    if own != torch.bfloat16:
        found.append(Source("dtype", "the sampler computes in bfloat16", coarse))
    if own == torch.float32 and EQUAL < gap <= noise.widest:
        found.append(Source("dtype", "the sampler computes in float16", stored_logits(side, sampled, torch.float16)))
    if own in (torch.bfloat16, torch.float16) and size(sampled.logprobs - exact) <= 0.1 * noise.own:
        found.append(Source("dtype", "the sampler computes in float32", stored_logits(side, sampled, torch.float32)))
    return found


def older_sources(older: Sequence[Side], sampled: Sampled, own: Tensor, search: Search) -> list[Source]:
    """Older weights: per rollout the checkpoint, or the trainer's model, that is nearest to the sampler's log-probs."""
    if not older:
        return []
    every = [own, *(stored_logits(side, sampled, side.dtype) for side in older)]
    gaps = torch.stack([(sampled.logprobs - sampled.target_logprobs(one)).square() for one in every])
    sums = torch.zeros(len(every), len(sampled.rollouts), dtype=gaps.dtype).index_add_(1, sampled.rollout, gaps)
    nearest = sums.argmin(0)
    mixed = own.clone()
    for i, base in enumerate(sampled.bases.tolist()):
        end = base + len(sampled.rollouts[i].tokens) - int(sampled.starts[i])
        mixed[base:end] = every[int(nearest[i])][base:end]
    counts = [f"{int((nearest == k + 1).sum())} by {side.label}" for k, side in enumerate(older)]
    text = f"of {len(sampled.rollouts)} rollouts, {', '.join(counts)}"
    return [Source(STALE, text, mixed), *(Source(STALE, f"sampled by {s.label}", x) for s, x in zip(older, every[1:], strict=True))]


def with_structure(search: Search, side: Side, best: Explanation) -> tuple[Explanation, str]:
    """The explanation with another architecture, where one explains more; and the line that says what was tried."""
    model = side.reference()
    if model is None:
        return best, "other architectures (no spec is known)"
    model = in_dtype(model, torch.float32)
    longest = sorted(search.sampled.rollouts, key=lambda one: -len(one.tokens))
    few, total = [], 0
    for one in longest:
        if few and total + len(one.tokens) > STRUCTURE_TOKENS:
            break
        few.append(one)
        total += len(one.tokens)
    sampled = Sampled(few)

    def left(changed: Side, settings: Sequence[Settings]) -> float:
        logits = stored_logits(changed, sampled, torch.float32)
        part = Search(sampled, logits, (), search.floor)
        return min(part.left(Explanation(part.own, best.alignment, one)) for one in settings)

    both = (RAW, best.settings)
    before = left(ModelSide(model), both)
    found = find_variant(model, lambda changed: left(ModelSide(changed), both), before, search.floor, STRUCTURE_SECONDS)
    tried = f"{found.tried} other architectures" + ("" if found.complete else f" in {STRUCTURE_SECONDS:.0f} s, not all")
    if found.variant is None or found.model is None or found.error > HALF * before:
        return best, tried
    logits = stored_logits(ModelSide(found.model), search.sampled, torch.float32)
    source = Source("structure", f"{found.variant.cause}: {found.variant.description}", logits)
    other = search.run(start=Explanation(source, best.alignment))
    return (other if search.left(other) < search.left(best) else best), tried


# -- the verdict ----------------------------------------------------------------------------------------------------


@dc.dataclass(frozen=True)
class Context:
    """What the verdict needs beside the explanation."""

    side: Side
    path: str
    rollouts: Sequence[Rollout]
    dtype: torch.dtype
    noise: Noise
    trainer: Tensor  # log-probs of the sampled tokens
    tried: str  # architectures
    older: bool
    why: bool


def verdict_of(search: Search, best: Explanation, given: Context) -> RolloutVerdict:
    """The verdict: the components of the gap, and what is left by its size and shape."""
    sampled, notes = search.sampled, []
    gap, found, rest = components(search, best)
    if size(rest) > given.noise.widest and best.settings != RAW:
        total = gap.square().sum()
        explained = sum((one.values @ gap / total).item() for one in found if one.cause in ("temperature", "truncation"))
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
    causes.sort(key=lambda one: -one.share)
    if len(sampled.rollouts) < len(given.rollouts):
        notes.append(f"{len(sampled.rollouts)} of {len(given.rollouts)} rollouts were used: their logits fill the memory allowed")
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


def rest_of(sampled: Sampled, valid: Tensor, rest: Tensor, given: Context) -> list[Component]:
    """What the explanation leaves: rounding by its size, and what is more than that."""
    noise, left = given.noise, size(rest)
    formula = "s − log q"
    if left <= noise.floor:
        text = f"rounding of {short(given.dtype)}: batch shape, kernels, cached decoding; its size here is {noise.own:.1e}"
        return [Component("batch shape", text, formula, rest)]
    if left <= noise.widest:
        text = f"the sampler rounds as bfloat16 does, whose size here is {noise.coarse:.1e}"
        return [Component("dtype", text, formula, rest)]
    rounding = rest.clamp(-noise.floor, noise.floor)
    more = rest - rounding
    cause, text = beyond(sampled, valid, more)
    return [Component("batch shape", f"rounding of {short(given.dtype)}", formula, rounding), Component(cause, text, formula, more)]


def beyond(sampled: Sampled, valid: Tensor, rest: Tensor) -> tuple[str, str]:
    """Name what no candidate explains by its shape: it grows with the age of the weights, with the position, or neither."""
    versions, rollout = by_version(sampled.rollouts), sampled.rollout[valid]
    if len(versions) > 1:
        ages = [versions[::-1].index(one.version) if one.version is not None else -1 for one in sampled.rollouts]
        age = torch.tensor(ages)[rollout]
        known = age >= 0
        means = [rest.abs()[age == i].mean().item() for i in range(len(versions)) if bool((age == i).any())]
        correlation = spearman(torch.arange(len(means)).double(), torch.tensor(means)) if len(means) > 2 else 1.0
        if bool(known.any()) and len(means) > 1 and means[0] <= AGES * means[-1] and correlation >= AGES:
            shown = ", ".join(f"{v}: {m:.2g}" for v, m in zip(versions[::-1], means, strict=False))
            return STALE, f"what is left grows with the age of weights_version ({shown})"
    position = sampled.position[valid]
    grows = spearman(position.double(), rest.abs())
    if grows >= GROWS and grows * len(rest) ** 0.5 >= EVIDENCE:
        return "structure", f"what is left grows with the position (rank correlation {grows:.2f}): rope, window, positions"
    return "unexplained", "no candidate explains it"


def contradictions(settings: Settings, rollouts: Sequence[Rollout]) -> list[str]:
    """Settings that the file records and the fit contradicts. A sampler may report log-probs before any of them."""
    recorded = {one.settings for one in rollouts}
    if len(recorded) != 1 or (said := recorded.pop()) is None:
        return []
    found = []
    for name in ("temperature", "min_p", "top_k", "top_p"):
        fitted, given = getattr(settings, name), getattr(said, name)
        neutral = getattr(RAW, name)
        if fitted != neutral and (given == neutral or abs(fitted - given) > 0.05 * abs(given)):
            text = "none" if given is None else f"{given:g}"
            found.append(f"the file records {name} {text}, and the log-probs are those of {name} {fitted:.4g}")
    return found


def raw_notes(best: Explanation, sampled: Sampled) -> list[str]:
    """A note where a temperature is recorded, and the log-probs are those before it."""
    recorded = {one.settings.temperature for one in sampled.rollouts if one.settings is not None} - {1.0}
    if not recorded or best.settings.temperature != 1:
        return []
    shown = ", ".join(f"{t:g}" for t in sorted(recorded))
    return [f"the file records temperature {shown}, and the log-probs are those before temperature"]


def trainer_notes(sampled: Sampled, given: Context) -> list[str]:
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
