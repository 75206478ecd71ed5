"""Verify: two sides, the same prompts, one verdict.

    forward     a short prompt, every tap, in float64 and in the dtype of the sides
    decode      the same prompt with a cache: prefill, then token by token; against the whole pass of the same side, and across
                sides
    long        one row past every window and every length that the spec or a config names, layer by layer

equal        inside the bounds of clean pairs at every tap                                        exit code 0
rounding     further apart than clean pairs, but the same function in float64                     exit code 0
structural   two different functions: the first tap at which they diverge, and the cause          exit code 1
non-finite   a weight or an activation is NaN or infinite, so nothing can be compared from there  exit code 1

The first pass that fails decides the verdict, and later ones are not run.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Callable
from math import isfinite
from typing import Any

import torch

from dovetail.proof.compare.cause import Cause, CauseSearch, WeightDifference, find_cause, nonfinite_weights, weight_differences
from dovetail.proof.compare.comparison import (
    EXACT,
    Progress,
    SideComparison,
    Status,
    Tap,
    compare_recordings,
    compare_sides,
    places_of,
    relative_gap,
    row_scale,
    short,
)
from dovetail.proof.compare.decoding import STEPS, run_decoding
from dovetail.proof.compare.float64 import float32_islands_widened
from dovetail.proof.compare.match import comparable, layer_of
from dovetail.proof.compare.prompt import LONGEST, Prompt, limits_of, long_length, random_prompt
from dovetail.proof.compare.record import Recording
from dovetail.proof.compare.sides import Side

NEVER = ("padding", "gradients and training mode", "devices other than the CPU")
FAILED: tuple[Status, ...] = ("structural", "non-finite")


@dc.dataclass(frozen=True)
class Pass:
    """One comparison on one prompt."""

    name: str
    prompt: Prompt
    comparison: SideComparison
    across: bool = True  # False: a side against itself, or two decoded runs; no cause is searched

    def data(self) -> dict[str, Any]:
        """The pass as JSON data; a number that is not finite is null."""
        taps = [{**finite(dc.asdict(tap)), "state": tap.status} for tap in self.comparison.taps]
        return {
            "pass": self.name,
            "prompts": self.prompt.batch,
            "tokens": self.prompt.n,
            "verdict": self.comparison.status,
            "taps": taps,
        }


@dc.dataclass
class Verdict:
    """The result of a comparison of two sides."""

    a: str
    b: str
    passes: list[Pass] = dc.field(default_factory=list)
    cause: Cause | None = None
    searched: bool = False  # whether a cause was searched
    weights: list[WeightDifference] = dc.field(default_factory=list)  # tensors whose values differ
    nonfinite: list[str] = dc.field(default_factory=list)  # weights that hold NaN or infinity: `A: layers.0.mixer.q.weight`
    tested: list[str] = dc.field(default_factory=list)
    not_tested: list[str] = dc.field(default_factory=list)
    notes: list[str] = dc.field(default_factory=list)
    recorded: str = ""  # the engine that recorded B, where B is a dump
    watch: Callable[[Pass], None] = dc.field(default=lambda one: None, repr=False)  # called with each pass when it is known

    def add(self, one: Pass) -> None:
        """Add a pass."""
        self.passes.append(one)
        self.watch(one)

    @property
    def deciding(self) -> Pass:
        """The first pass that fails, or that rounds too much; the first one where none does."""
        failed = [one for one in self.passes if one.comparison.status in FAILED]
        rounding = [one for one in self.passes if one.comparison.status == "rounding"]
        return next(iter([*failed, *rounding, *self.passes]))

    @property
    def comparison(self) -> SideComparison:
        """The comparison that decides the verdict."""
        return self.deciding.comparison

    @property
    def status(self) -> Status:
        """The verdict in one word."""
        status = self.comparison.status
        return "non-finite" if self.nonfinite and status not in FAILED else status

    @property
    def failed(self) -> bool:
        """Whether the exit code is 1."""
        return self.status in FAILED

    @property
    def first(self) -> Tap | None:
        """The tap that decides the verdict."""
        return self.comparison.first or self.comparison.first_rounding

    @property
    def layer(self) -> str | None:
        """The layer of that tap, `embed` or `head`."""
        return None if self.first is None else "embed" if self.first.address == "layers.0.in" else layer_of(self.first.address)

    def coverage(self) -> tuple[str, str]:
        """One line with what was tested, one with what was not."""
        dtypes = " and ".join(dict.fromkeys(short(dtype) for dtype in (*self.comparison.dtypes,)))
        return f"float64 and {dtypes}; {'; '.join(self.tested)}", "; ".join(self.not_tested)

    def data(self) -> dict[str, Any]:
        """The verdict as JSON data; a number that is not finite is null."""
        tested, not_tested = self.coverage()
        return {
            "a": self.a,
            "b": self.b,
            "dtypes": [short(dtype) for dtype in self.comparison.dtypes],
            **self.deciding.data(),
            "verdict": self.status,
            "first": None if self.first is None else self.first.address,
            "layer": self.layer,
            "cause": None if self.cause is None else dc.asdict(self.cause),
            "weights": [finite(weight._asdict()) for weight in self.weights],
            "non_finite_weights": self.nonfinite,
            "not_compared": self.comparison.missing,
            "passes": {one.name: one.comparison.status for one in self.passes},
            "tested": tested,
            "not_tested": not_tested,
            "notes": self.notes,
            "engine": self.recorded or None,
        }


def finite(data: dict[str, Any]) -> dict[str, Any]:
    """The same data with null for every number that JSON cannot hold."""
    return {name: None if isinstance(x, float) and not isfinite(x) else x for name, x in data.items()}


def verify(
    a: Side,
    b: Side,
    prompt: Prompt,
    *,
    dtype: torch.dtype | None = None,
    why: bool = True,
    decode: bool = True,
    longest: int = LONGEST,
    progress: Progress = lambda line: None,
    watch: Callable[[Pass], None] = lambda one: None,
) -> Verdict:
    """Compare two sides; where they are two functions, search for the cause. `longest` bounds the long prompt; 0: none."""
    verdict = Verdict(a.label, b.label, watch=watch)
    for letter, side in (("A", a), ("B", b)):
        verdict.nonfinite += [f"{letter}: {name}" for name in nonfinite_weights(side)]
        gap = train_mode_gap(side, prompt)
        if gap is not None:
            text = f"{letter} was handed over in train mode, where dropout changes its output by {gap:.1e}"
            verdict.notes.append(f"{text}; it is compared in eval mode")
    forward = Pass("forward", prompt, compare_sides(a, b, prompt, dtype=dtype, progress=progress))
    verdict.add(forward)
    verdict.tested.append(f"{prompt.batch} × {prompt.n} tokens at {len(forward.comparison.taps)} taps")
    if len(forward.comparison.taps) == 1:
        verdict.notes.append("only the outputs could be compared; --map THEIRS=OURS pairs modules by name")
    if decode and not verdict.failed:
        _decode(verdict, a, b, forward, progress)
    if longest and not verdict.failed:
        _long(verdict, a, b, prompt, dtype, longest, progress)
    if verdict.failed:
        verdict.not_tested.append(f"what follows the first difference, in {verdict.deciding.name}")
    flips = forward.comparison.flips
    if any(flips):
        text = f"routers choose other experts than in float64 on near-ties: A {flips[0]} times, B {flips[1]} times"
        verdict.notes.append(f"{text}; the bound on rounding does not apply to the tokens that these choices reach")
    verdict.not_tested += NEVER
    if why:
        explain(verdict, a, b, progress=progress)
    return verdict


@torch.no_grad()
def train_mode_gap(side: Side, prompt: Prompt) -> float | None:
    """How far the output in train mode is from that in eval mode, where the side was handed over in train mode and they
    differ."""
    module = side.module(side.dtype)
    if not any(one.training for one in module.modules()):
        return None
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    with torch.random.fork_rng(devices=[]), float32_islands_widened(side.dtype):
        trained = side.forward(module, prompt)
    for name, buffer in module.named_buffers():  # a batch norm in train mode changes its running mean
        buffer.copy_(buffers[name])
    with float32_islands_widened(side.dtype):
        evaluated = side.forward(module.eval(), prompt)
    return None if trained.equal(evaluated) else relative_gap(trained, evaluated, row_scale(evaluated))


def _decode(verdict: Verdict, a: Side, b: Side, forward: Pass, progress: Progress) -> None:
    """Decode with a cache on both sides; against the whole pass of the same side, and across sides."""
    spec, comparison, prompt = a.spec or b.spec, forward.comparison, forward.prompt
    sizes = {} if spec is None else comparable(spec)
    decoded: dict[str, tuple[Recording, Recording]] = {}
    for i, (letter, side) in enumerate((("A", a), ("B", b))):
        recordings: list[Recording] = []
        for dtype in (EXACT, comparison.dtypes[i]):
            progress(f"{side.label}, decoding in {str(dtype).removeprefix('torch.')}")
            module = side.module(dtype)
            found = run_decoding(side.decoder, module, prompt, dtype, places_of(a, b, side)(module), sizes)
            if isinstance(found, str):
                verdict.not_tested.append(f"decoding of {letter} ({found})")
                break
            recordings.append(found)
        if len(recordings) == 2:
            decoded[letter] = (recordings[0], recordings[1])
            whole = (comparison.exact[i], comparison.own[i])
            pairs = ((recordings[0], whole[0]), (recordings[1], whole[1]))
            dtypes = (comparison.dtypes[i], comparison.dtypes[i])
            verdict.add(Pass(f"decode {letter}", prompt, compare_recordings(*pairs, prompt, dtypes), across=False))
    if len(decoded) == 2:
        pairs = [(decoded["A"][k], decoded["B"][k]) for k in range(2)]
        across = compare_recordings(pairs[0], pairs[1], prompt, comparison.dtypes)
        verdict.add(Pass("decode A and B", prompt, across, across=False))
    if decoded:
        prefill = max(1, prompt.n - STEPS)
        verdict.tested.append(f"decoding of {' and '.join(decoded)} with a cache ({prefill} + {prompt.n - prefill} × 1 tokens)")


def _long(
    verdict: Verdict, a: Side, b: Side, prompt: Prompt, dtype: torch.dtype | None, longest: int, progress: Progress
) -> None:
    """Compare one long row, layer by layer."""
    spec = a.spec or b.spec
    if spec is None or not spec.embed.causal():
        verdict.not_tested.append("longer prompts (no spec)" if spec is None else "other sizes of the input")
        return
    runs = (*verdict.comparison.exact, *verdict.comparison.own)
    slowest = max(recording.seconds for recording in runs) / (prompt.batch * prompt.n)
    limits = limits_of(spec, (a.config, b.config))
    length = long_length(spec, limits, longest=longest, seconds_per_token=slowest)
    if length.beyond:
        first = length.beyond[0]
        verdict.not_tested.append(f"lengths from {first.tokens:,} tokens on ({first.name}): {length.reason}")
    if length.tokens <= prompt.n:
        return
    one = random_prompt(spec, rows=1, length=length.tokens, avoid=padding_token(a, b))
    progress(f"{length.tokens} tokens")
    comparison = compare_sides(a, b, one, dtype=dtype, layers_only=True, progress=progress)
    verdict.add(Pass("long prompt", one, comparison))
    verdict.tested.append(f"1 × {length.tokens} tokens layer by layer")


def padding_token(*sides: Side) -> int | None:
    """The padding token of a side, which random prompts leave out."""
    tokens = (side.config.get("pad_token_id") for side in sides)
    return next((token for token in tokens if isinstance(token, int)), None)


def explain(verdict: Verdict, a: Side, b: Side | None, noise: float = 0.0, progress: Progress = lambda line: None) -> None:
    """Search for the cause of a structural verdict, where the spec of a side is known. `b` is None where it was recorded, and
    `noise` is then the epsilon of its dtype."""
    deciding, first = verdict.deciding, verdict.comparison.first
    if verdict.status != "structural" or not deciding.across or first is None:
        return
    progress("searching for the cause")
    verdict.searched = True
    for known, (side, other) in enumerate(((a, b), (b, a))):
        model = None if side is None else side.reference()
        if model is None:
            continue
        spec = None if other is None else other.spec
        search = CauseSearch(model, deciding.prompt, deciding.comparison, known=known, other=spec, noise=noise)
        cause = find_cause(
            search, first.address, lambda other=other: {} if other is None else dict(other.module(EXACT).state_dict())
        )
        if cause is not None:
            verdict.cause = dc.replace(cause, side="ab"[known])
            return
    if b is not None:
        verdict.weights = weight_differences(a, b)
