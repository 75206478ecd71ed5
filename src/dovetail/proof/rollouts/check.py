"""Explain rollouts: the sampler's log-probs in a file against the trainer's model.

1. The model runs on the rollouts in its own dtype, in float64 and in bfloat16: the distances are the size of rounding.
2. Shift, dtype, older weights, temperature and truncation are searched (explain.py).
3. What is left and larger than rounding: another architecture with the same weights (structure.py).
4. What is still left: staleness where it grows with the age of `weights_version`; structure where it grows with the position;
   else it is unexplained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from dovetail.base.errors import FileError, UsageError
from dovetail.proof.compare.comparison import EXACT, Progress, short
from dovetail.proof.compare.opening import EMITTED, SideLike, label_of, local
from dovetail.proof.compare.sides import ModelSide, Side, in_dtype
from dovetail.proof.rollouts.decomposition import RoundingSize, VerdictContext, verdict_of
from dovetail.proof.rollouts.explain import Explanation, LogitSource, Search
from dovetail.proof.rollouts.file import Rollout, read_rollouts
from dovetail.proof.rollouts.fit import size
from dovetail.proof.rollouts.logits import (
    Sampled,
    check_rollouts,
    logit_rows,
    side_logprobs,
    some_rollouts,
    stored_logits,
)
from dovetail.proof.rollouts.sampling import RAW, Settings
from dovetail.proof.rollouts.structure import find_variant
from dovetail.proof.rollouts.verdict import EQUAL, STALE, RolloutVerdict

HALF = 0.5  # a variant of the architecture leaves at most this fraction of the gap
STRUCTURE_SECONDS, STRUCTURE_TOKENS = 120.0, 1024


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
    noise = RoundingSize(size(trainer - exact), size(some.target_logprobs(coarse) - exact))
    recorded = [rollout.settings for rollout in some.rollouts if rollout.settings is not None]
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
    return verdict_of(search, best, VerdictContext(side, path, rollouts, dtype, noise, trainer, tried, bool(older), why))


def check_vocabulary(rollouts: Sequence[Rollout], vocab: int, path: str) -> None:
    """Raise for a token that has no logit."""
    for rollout in rollouts:
        if max(rollout.tokens) >= vocab:
            raise FileError(f"{path}:{rollout.line}: token {max(rollout.tokens)} is beyond the {vocab} logits of the model")


def dtype_sources(
    side: Side, sampled: Sampled, own: torch.dtype, coarse: Tensor, exact: Tensor, gap: float, noise: RoundingSize
) -> list[LogitSource]:
    """The model in other dtypes. One that rounds less than the trainer counts only where it leaves next to nothing: against
    any sampler that rounds, an exact run is nearer than another rounded one."""
    result = []
    if own != torch.bfloat16:
        result.append(LogitSource("dtype", "the sampler computes in bfloat16", coarse))
    if own == torch.float32 and EQUAL < gap <= noise.widest:
        result.append(LogitSource("dtype", "the sampler computes in float16", stored_logits(side, sampled, torch.float16)))
    if own in (torch.bfloat16, torch.float16) and size(sampled.logprobs - exact) <= 0.1 * noise.own:
        result.append(LogitSource("dtype", "the sampler computes in float32", stored_logits(side, sampled, torch.float32)))
    return result


def older_sources(older: Sequence[Side], sampled: Sampled, own: Tensor, search: Search) -> list[LogitSource]:
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
    alone = (LogitSource(STALE, f"sampled by {side.label}", logits) for side, logits in zip(older, every[1:], strict=True))
    return [*alone, LogitSource(STALE, text, mixed)] if len(sampled.rollouts) > 1 else list(alone)


def with_structure(search: Search, side: Side, best: Explanation) -> tuple[Explanation, str]:
    """The explanation with another architecture, where one explains more; and the line that says what was tried."""
    model = side.reference()
    if model is None:
        return best, "other architectures (no spec is known)"
    model = in_dtype(model, torch.float32)
    longest = sorted(search.sampled.rollouts, key=lambda rollout: -len(rollout.tokens))
    totals = accumulate(len(one.tokens) for one in longest)
    sampled = Sampled(
        [one for one, total in zip(longest, totals, strict=True) if one is longest[0] or total <= STRUCTURE_TOKENS]
    )

    def left(changed: Side, settings: Sequence[Settings]) -> float:
        logits = stored_logits(changed, sampled, torch.float32)
        part = Search(sampled, logits, (), search.floor)
        return min(part.left(Explanation(part.own, best.alignment, setting)) for setting in settings)

    both = (RAW, best.settings)
    before = left(ModelSide(model), both)
    found = find_variant(model, lambda changed: left(ModelSide(changed), both), before, search.floor, STRUCTURE_SECONDS)
    tried = f"{found.tried} other architectures" + ("" if found.complete else f" in {STRUCTURE_SECONDS:.0f} s, not all")
    if found.variant is None or found.model is None or found.error > HALF * before:
        return best, tried
    logits = stored_logits(ModelSide(found.model), search.sampled, torch.float32)
    source = LogitSource("structure", f"{found.variant.cause}: {found.variant.description}", logits)
    other = search.run(start=Explanation(source, best.alignment))
    return (other if search.left(other) < search.left(best) else best), tried


def explain_file(
    a: SideLike,
    file: str | Path,
    older: Sequence[SideLike] | str | Path,
    dtype: torch.dtype | None,
    pairs: Mapping[str, str],
    why: bool,
    progress: Progress,
) -> RolloutVerdict:
    """Explain the gap between the log-probs in a file and those of a side."""
    if isinstance(a, str) and a.startswith(EMITTED):
        raise UsageError(f"{a}: emitted files hold no weights; give the model directory")
    progress(f"reading {file}")
    rollouts = read_rollouts(file)
    before = (older,) if isinstance(older, (str, Path)) else tuple(older)
    progress(f"reading {label_of(a)}")
    side, earlier = local(a, pairs), [local(one, pairs) for one in before]
    return explain_rollouts(side, str(file), rollouts, older=earlier, dtype=dtype, why=why, progress=progress)
