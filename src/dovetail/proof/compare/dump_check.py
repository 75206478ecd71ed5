"""Compare a side that runs here with a dump of another engine.

    gap      = |dumpₜ − aₜ| with a in float64, in units of the rms row norm of a: at its largest and at its median token
    own      = the same for a in the dtype of the dump

A dump has no float64 run, so a bug and rounding are distinguished by size: the engine may round a few times as much as our own
run in its dtype (comparison.py). Inside that bound of float32 or wider the verdict is equal; inside the wider bound of bfloat16
or float16 it is rounding, for a bug smaller than that cannot be seen; beyond, the sides are two functions.

Tokens that the engine computed one by one, from its cache, are a pass of their own behind the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dovetail.base.errors import FileError
from dovetail.nn.finite import nonfinite
from dovetail.proof.compare.cause import nonfinite_weights
from dovetail.proof.compare.check import NEVER, Pass, Verdict, explain
from dovetail.proof.compare.comparison import (
    EXACT,
    Progress,
    SideComparison,
    Tap,
    envelope,
    excused_tokens,
    layers_before,
    relative_gap,
    router_flips,
    row_scale,
    short,
)
from dovetail.proof.compare.dump import Dump
from dovetail.proof.compare.dump_match import Sources, match_dump
from dovetail.proof.compare.match import MatchedModule, comparable, layer_of
from dovetail.proof.compare.prompt import Prompt, prompt_of_ids
from dovetail.proof.compare.record import ANSWER, Recording
from dovetail.proof.compare.sides import Side, run

NOT_RUN = ("the dump in float64", "longer prompts")


class SequenceGroup(NamedTuple):
    """The sequences of a dump of one length: their prompt, the indices of their tokens, and the tokens of a row that were
    computed before the first single one."""

    prompt: Prompt
    tokens: Tensor
    prefill: int


def groups_of(dump: Dump, vocab: int | None) -> list[SequenceGroup]:
    """The sequences of a dump by their length, longest first."""
    start, by_length = 0, dict[int, list[tuple[int, int, list[int]]]]()
    for sequence, ids in dump.sequences.items():
        by_length.setdefault(len(ids), []).append((sequence, start, ids))
        start += len(ids)
    groups = []
    for length, rows in sorted(by_length.items(), reverse=True):
        tokens = torch.cat([torch.arange(start, start + length) for _, start, _ in rows])
        prefill = min(dump.prefill(sequence) for sequence, _, _ in rows)
        groups.append(SequenceGroup(prompt_of_ids([ids for _, _, ids in rows], vocab), tokens, prefill))
    return groups


def verify_dump(
    side: Side,
    dump: Dump,
    *,
    why: bool = True,
    progress: Progress = lambda line: None,
    watch: Callable[[Pass], None] = lambda one: None,
) -> Verdict:
    """Compare a side with a dump; where they are two functions, search for the cause."""
    verdict = Verdict(side.label, dump.label, recorded=dump.engine or "another engine", watch=watch)
    verdict.nonfinite = [f"A: {name}" for name in nonfinite_weights(side)]
    verdict.notes += [f"positions in the dump: {sentence}" for sentence in dump.shifted()[:3]]
    sources: Sources | None = None
    spec, counts = side.spec, [0, 0]
    for group in groups_of(dump, None if spec is None else spec.vocab):
        recordings = _recorded(side, group, dump.dtype, progress)
        if sources is None:
            sources = match_dump(dump, _wanted(recordings[0], group), spec, group.tokens, recordings[0].alias)
            if not sources:
                raise FileError(f"{dump.label}: none of its {len(dump.names())} tensors is an activation of {side.label}")
        theirs = _dumped(dump, sources, group, recordings[0])
        for pass_ in _passes(dump, recordings, theirs, group):
            verdict.add(pass_)
            counts[pass_.name == "decode B"] += pass_.prompt.batch * pass_.prompt.n
    verdict.passes.sort(key=lambda one: one.name == "decode B")
    verdict.tested.append(f"{counts[0]:,} tokens at {len(verdict.passes[0].comparison.taps)} taps")
    (verdict.tested if counts[1] else verdict.not_tested).append(
        f"{counts[1]:,} tokens decoded by B with a cache" if counts[1] else "decoding (the dump has no such step)"
    )
    verdict.not_tested += [*NOT_RUN, *NEVER]
    verdict.notes += _unmatched(verdict)
    if why:
        explain(verdict, side, None, torch.finfo(dump.dtype).eps, progress)
    return verdict


def _recorded(side: Side, group: SequenceGroup, dtype: torch.dtype, progress: Progress) -> tuple[Recording, Recording]:
    """The side in float64 and in the dtype of the dump."""
    sizes = {} if side.spec is None else comparable(side.spec)
    recordings = []
    for one in (EXACT, dtype):
        progress(f"{side.label}, {short(one)}")
        recordings.append(run(side, group.prompt, one, lambda module: _places(side, module), sizes))
    return recordings[0], recordings[1]


def _places(side: Side, module: nn.Module) -> Sequence[MatchedModule]:
    """The places of a side; without a spec, all its modules."""
    if side.spec is not None:
        return side.places(module, side.spec)
    return [MatchedModule(name, (name,)) for name, _ in module.named_modules() if name]


def _wanted(recording: Recording, group: SequenceGroup) -> Mapping[str, Tensor]:
    """Our activations with one row per token."""
    rows = len(group.tokens)
    flat = {address: x.reshape(rows, -1) for address, x in recording.taps.items() if x.numel() % rows == 0}
    return {address: x.to(EXACT) for address, x in flat.items()}


class Dumped(NamedTuple):
    """Activations of a dump by our addresses, and which tokens they have."""

    taps: dict[str, Tensor]
    present: dict[str, Tensor]


def _dumped(dump: Dump, sources: Sources, group: SequenceGroup, own: Recording) -> Dumped:
    taps, present = {}, {}
    for address, source in sources.items():
        x = source.of(dump)[group.tokens]
        taps[address] = x[:, : own.taps[address].shape[-1]] if address == ANSWER else x
        present[address] = source.present(dump)[group.tokens]
    return Dumped(taps, present)


def _passes(dump: Dump, recordings: tuple[Recording, Recording], theirs: Dumped, group: SequenceGroup) -> list[Pass]:
    """The prefill of a group, and its decoded tokens where there are any."""
    prompt, prefill = group.prompt, group.prefill
    order = torch.arange(prompt.n).repeat(prompt.batch)
    start = Prompt(prompt.inputs[:, :prefill], prefill)
    passes = [Pass("forward", start, _compared(dump, recordings, theirs, group, order < prefill))]
    if prefill < prompt.n:
        steps = Prompt(prompt.inputs[:, prefill:], prompt.n - prefill)
        passes.append(Pass("decode B", steps, _compared(dump, recordings, theirs, group, order >= prefill), across=False))
    return passes


def _compared(
    dump: Dump, recordings: tuple[Recording, Recording], theirs: Dumped, group: SequenceGroup, rows: Tensor
) -> SideComparison:
    """The comparison of some of the tokens, in the order of our computation."""
    exact, own = recordings
    flips = router_flips(exact, own)
    depth = len({layer_of(address) for address in exact.taps} - {"embed", "head"})
    cut, theirs_cut, own_cut = Recording(), Recording(), Recording()
    taps: list[Tap] = []
    for address, x in exact.taps.items():
        if address not in theirs.taps or x.numel() != theirs.taps[address].numel():
            continue
        excused = excused_tokens([flips], address, group.prompt, causal=True)
        runs = [one.reshape(len(rows), -1).to(EXACT) for one in (x, own.taps[address], theirs.taps[address])]
        for recording, one in zip((cut, own_cut, theirs_cut), runs, strict=True):
            if bool(theirs.present[address][rows].all()) or recording is not theirs_cut:
                recording.put(address, one[rows])
        compared = rows & theirs.present[address] & ~excused
        if bool(compared.any()):
            taps.append(_tap(address, [one[compared] for one in runs], dump.dtype, layers_before(address, depth)))
    missing = [address for address in exact.taps if address not in theirs.taps and address not in exact.alias]
    dtypes = (dump.dtype, dump.dtype)
    return SideComparison(taps, dtypes, (cut, theirs_cut), (own_cut, theirs_cut), missing)


def _tap(address: str, runs: Sequence[Tensor], dtype: torch.dtype, layers: int) -> Tap:
    """One tap from A in float64, A in the dtype of the dump, and the dump."""
    exact, own, theirs = runs
    scale = row_scale(exact)
    gaps = [(relative_gap(x, exact, scale), relative_gap(x, exact, scale, median=True)) for x in (own, theirs)]
    (own_worst, own_typical), (worst, typical) = gaps
    wide = envelope((dtype, dtype), layers, (own_typical, own_typical), (own_worst, own_worst))
    share = min(1.0, torch.finfo(torch.float32).eps / torch.finfo(dtype).eps)  # rounding errors follow the precision
    # of the largest and the median gap the one nearer to its bound, or further beyond it
    decided = max((worst, wide.worst), (typical, wide.typical), key=lambda pair: pair[0] / pair[1])
    culprit = (
        "B" if nonfinite(theirs) else "A in float64" if nonfinite(exact) else f"A in {short(dtype)}" if nonfinite(own) else ""
    )
    bounds = (wide.worst * share, wide.typical * share, decided[1])
    return Tap(address, worst, typical, decided[0], own_worst, worst, *bounds, nonfinite=culprit)


def _unmatched(verdict: Verdict) -> list[str]:
    """A note where the layer before the first difference has no output in the dump: the difference may begin there."""
    first = verdict.comparison.first
    layer = "" if first is None else layer_of(first.address)
    number = int(layer.rpartition(".")[2]) if layer.startswith("layers.") else 0
    before = f"layers.{number - 1}"
    if not number or before not in verdict.comparison.missing:
        return []
    return [f"no tensor of the dump could be matched with the output of {before}: the difference may begin there"]
