"""Law 28, looking: what is read at a tap is what the model computes with, and what is put there is what it goes on with.

Every tap of the spec, in full forward passes, chunks and cached decode:

    noise at a tap changes the output                       an intervention that is ignored
    patched cached decode = patched full pass               one that is applied to another token, or in prefill only
    a patched recurrent state carries over, in any chunks
    embedded + Σ of every `*_add` = the residual stream     a branch's tap that is not what it adds
    the final norm and the head of the last residual stream = the logits
    the gradient at a tap = finite differences              a gradient of another tensor
    integrated gradients sum to the difference              one that is scaled or cut
    effective attention · values = the `y` of a mixer       a scan of other values, or of an earlier token
    a sweep that continues from a cache = full passes       keys of another run, a state of another token

Taps are tested side by side: in a batch of equal rows, row i has the i-th tap patched. A part declares taps that cannot be
tested as `excepts` "looking.<pattern>", with the reason.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from dovetail.look.address import is_state
from dovetail.look.gradient import integrated_gradients
from dovetail.look.intervention import Replacement, noise
from dovetail.look.mixing import Heard, effective
from dovetail.look.record import Trace
from dovetail.look.residual import final_residual, unembed
from dovetail.look.tracer import Tracer
from dovetail.model.construction import generator
from dovetail.nn.ctx import Losses
from dovetail.nn.groups import Mixer
from dovetail.nn.layout import TokenLayout
from dovetail.proof.laws.case import DERIVATIVE, DTYPE, RELATION, Case, N, law
from dovetail.proof.laws.sequence import CaseDecoder
from dovetail.proof.laws.swept import sweep_from_a_cache
from dovetail.spec.fold import taps
from dovetail.spec.part import walk

AT = (2, 11, 12, 14, 20)  # the patched positions: inside a chunk, at its end, in single steps
CHUNKS = (5, 7, 1, 1, 1, 6)
ROUNDING = 1e-11  # of a scale
TEN = 10  # tokens before a patched state
IN_ONE, IN_TWO = (TEN, 1, 3), (4, 6, 1, 3)
SUM = 1e-4  # of the attributions' absolute sum
SHARES = (1e-2, 1e-4, 1e-6)  # of a value, between it and the baseline: a kink of an activation may be in the longer ones
TOKENS = {"pos", "query", "key"}


@law(
    28,
    "looking",
    "noise at any tap changes the output; patched cached decode equals the patched pass; residuals, lens, gradients add up",
    budget=2.0,
)
def looking(case: Case) -> str:
    """Test every tap; return how many are excepted."""
    excepted, declared = exceptions_of(case), taps(case.spec)
    addresses = [address for address in declared if address not in excepted]
    values = observed(case, {}, "*")[1]
    floats = [address for address in addresses if values[address].is_floating_point()]
    moving = _gradients(case, floats, values)
    _noise(case, [address for address in addresses if address not in moving], values)
    ahead = case.spec.ahead() or 0
    alike = all(part.whole_prefill(scope) is None for _, part, scope in walk(case.spec))  # cached and whole, unpatched
    if case.spec.order() != "both" and ahead <= IN_TWO[0] and alike:
        _cached(case, [address for address in floats if TOKENS & {*declared[address].split()}])
        _carried(case, [address for address in floats if is_state(address)])
    sweep_from_a_cache(case, [address for address in floats if {"pos", "query"} & {*declared[address].split()}], AT)
    _residual(case, values)
    _mixing(case, values)
    reasons = sorted(set(excepted.values()))
    return f"{len(excepted)} of {len(declared)} taps excepted{': ' * bool(reasons)}{'; '.join(reasons)}"


def exceptions_of(case: Case) -> dict[str, str]:
    """The taps that parts except from this law, with the reason."""
    every = ((path, part.proof.excepts(part, scope)) for path, part, scope in walk(case.spec))
    named = ((path, name, why) for path, reasons in every for name, why in reasons.items() if name.startswith("looking."))
    patterns = {f"{path}.{name.removeprefix('looking.')}": why for path, name, why in named}
    return {tap: why for tap in taps(case.spec) for pattern, why in patterns.items() if fnmatchcase(tap, pattern)}


def equal_rows(case: Case, rows: int) -> Case:
    """The case with its first row, `rows` times."""
    wide = Case(case.spec, case.seed, case.model, rows=rows, n=case.n)
    wide.inputs = case.inputs[:1].expand(rows, *case.inputs.shape[1:])
    wide.source = None if case.source is None else case.source[:1].expand(rows, *case.source.shape[1:])
    return wide


def observed(
    case: Case, patch: Mapping[str, Replacement], *patterns: str, grad: bool = False, losses: bool = True
) -> tuple[Tensor, Trace]:
    """The output (rows, …) of a pass with a patch, the losses of multi-token prediction beside it (means over all rows), and
    what was recorded."""
    tracer = Tracer(case.spec, Trace(*patterns), patch, grad)
    with torch.set_grad_enabled(grad):
        ctx = case.ctx(taps=tracer, losses=Losses() if case.spec.mtp and losses else None)
        out = case.model(case.inputs, ctx).flatten(1)
    ahead = [x for path, x in ({} if ctx.losses is None else ctx.losses.by_path).items() if path.startswith("mtp.")]
    return torch.cat([out, *(x.expand(len(out), 1) for x in ahead)], 1), tracer.end()


def _outputs(case: Case, patch: Mapping[str, Replacement]) -> Tensor:
    """The output (rows, …) of a pass with a patch, and the hidden states beside it where the head reads few of them: with a
    causal mask, the first of them depends on no query and no decay."""
    out = observed(case, patch)[0]
    if case.spec.head is None or not case.spec.head.pools():
        return out
    inside = {address: value for address, value in patch.items() if not address.startswith("head.")}
    hidden = case.model.hidden(case.inputs, case.ctx(taps=Tracer(case.spec, None, inside)))[0]
    return torch.cat([out, hidden.flatten(1)], 1)


def _differ(got: Tensor, want: Tensor) -> Tensor:
    """(rows,) whether rows differ by more than rounding."""
    gap, scale = (got - want).flatten(1).abs().amax(1), want.flatten(1).abs().amax(1).clamp_min(1.0)
    return gap > ROUNDING * scale


@torch.no_grad()
def _noise(case: Case, addresses: Sequence[str], values: Trace) -> None:
    """Put noise at each tap, or other indices, and require another output."""
    tried = [address for address in addresses if not is_state(address)]  # a state after a full pass is read by nobody
    alone = [address for address in tried if address.startswith("mtp.")]  # whose loss is the mean over rows
    batches = [[address] for address in alone] + [[address for address in tried if address not in alone]]
    for batch in filter(None, batches):
        wide = equal_rows(case, len(batch) + 1)
        changed = torch.zeros(len(batch), dtype=torch.bool)
        for attempt in range(2):
            patch = {f"{a}[row={i}]": _other(values[a], case.seed, attempt) for i, a in enumerate(batch)}
            out = _outputs(wide, patch)
            case.true(bool(out.isfinite().all()), f"{batch[0]} and others: noise there makes the output not finite")
            want = _outputs(case, {})[:1] if len(batch) == 1 else out[-1:]  # the last row has no patch
            changed |= _differ(out, want)[:-1]
            if bool(changed.all()):
                break
        for address, differs in zip(batch, changed.tolist(), strict=True):
            case.true(differs, f"{address}: noise there changes nothing")


def _other(x: Tensor, seed: int, attempt: int) -> Replacement:
    """Noise, then more of it: an ngram's gate reads a direction, to which only a scale of another sign is another one. Of
    indices, others."""
    if x.is_floating_point():
        return noise((0.5, 2.0)[attempt], seed + attempt, relative=True)
    return [lambda i: (i + 1) % (x.max() + 1), lambda i: torch.full_like(i, int(x.min()))][attempt]


@torch.no_grad()
def _cached(case: Case, addresses: Sequence[str]) -> None:
    """Patch every tap at some positions, in one pass and in chunks and steps."""
    elsewhere = ("mtp.", "encoder.", *(["head."] if case.spec.head is not None and case.spec.head.pools() else []))
    patched = [address for address in addresses if not address.startswith(elsewhere)]
    if case.spec.encoder is not None:  # what reads the encoder output alone is computed once, at admission
        heard = Tracer(case.spec, Trace("*"))
        _decode(case, CHUNKS[:1], heard)
        patched = [address for address in patched if address in heard.pieces]
    if gap := _cached_gap(case, patched):
        single = [f"{address}: {gap}" for address in patched if (gap := _cached_gap(case, [address]))]
        case.true(False, f"patched cached decode and the patched pass: {(single or [gap])[0]}")
    case.true(True, "patched cached decode equals the patched pass")


def _cached_gap(case: Case, addresses: Iterable[str]) -> str:
    """How far both are apart; empty where they agree."""
    patch = {f"{address}[pos={'|'.join(map(str, AT))}]": noise(0.1, case.seed, relative=True) for address in addresses}
    whole, cached = Tracer(case.spec, None, patch), Tracer(case.spec, None, patch)
    ctx = case.ctx()
    ctx.taps = whole
    want, got = case.stream(case.inputs, ctx), _decode(case, CHUNKS, cached)
    if whole.unused or cached.unused:
        return f"{min(whole.unused | cached.unused)} is never reached"
    gap, scale = (got - want).abs().max(), want.abs().max().clamp_min(1.0)
    return "" if gap <= RELATION * scale else f"differ by {gap:.3g} at scale {scale:.3g}"


def _decode(case: Case, chunks: Iterable[int], listener: Tracer) -> Tensor:
    """The outputs (rows, …) of the tokens of all rows, fed in chunks."""
    rows = range(len(case.inputs))
    decoder, place, pieces = CaseDecoder(case, "contiguous", rows=len(rows)), 0, list[Tensor]()
    decoder.admit(rows, (N,) * len(rows))
    decoder.listen = listener
    for n in chunks:
        pieces.append(torch.stack(decoder.feed(rows, list(case.inputs[:, place : place + n]))))
        place += n
    return torch.cat(pieces, 1)


@torch.no_grad()
def _carried(case: Case, states: Sequence[str]) -> None:
    """Patch each recurrent state after ten tokens: later outputs change, and alike however the ten were fed."""
    if not states:
        return
    wide = equal_rows(case, len(states) + 1)
    patch = {f"{a}[pos={TEN - 1}, row={i}]": noise(0.5, case.seed, relative=True) for i, a in enumerate(states)}
    runs: list[Tensor] = []
    for chunks in (IN_ONE, IN_TWO):
        tracer = Tracer(case.spec, None, patch)
        runs.append(_decode(wide, chunks, tracer))
        case.true(not tracer.unused, f"{min(tracer.unused, default='')}: is never reached while decoding")
    case.same(runs[0], runs[1], "states patched after ten tokens, fed in one chunk and in two")
    case.true(not _differ(runs[0][:, :TEN], runs[0][-1:, :TEN]).any(), "a patched state changes earlier outputs")
    for address, differs in zip(states, _differ(runs[0][:, TEN:], runs[0][-1:, TEN:]).tolist(), strict=False):
        case.true(differs, f"{address}: noise in the state changes no later output")


@torch.no_grad()
def _residual(case: Case, values: Trace) -> None:
    """Add what every branch adds to the embedded tokens; then read the logits off the last residual stream."""
    stream = values["embedded"]
    for i, (block, module) in enumerate(zip(case.spec.layers, case.model.layers, strict=True)):
        case.same(values[f"layers.{i}.in"], stream, f"layers.{i}.in: the residual stream and what was added to the embedding")
        for step in block.steps():
            for name in step if block.wire.sums else ():
                stream = stream + values[f"layers.{i}.{name}_add"]
            after = values[f"layers.{i}.after_{step[0]}"]
            if block.wire.sums:
                case.same(after, stream, f"layers.{i}: the residual stream after {step[0]} and the sum of its branches")
            stream = after
        stream = final_residual(module, stream)
    if case.spec.head is not None:
        got = unembed(case.model, stream, case.ctx(layout=_layout(case)))
        case.same(got, case.run(), "the head of the last residual stream and the logits")


def _layout(case: Case) -> TokenLayout:
    """The layout behind the embedding, which may add tokens."""
    with torch.no_grad():
        return case.model.hidden(case.inputs, case.ctx())[1].layout


def _gradients(case: Case, addresses: Sequence[str], values: Trace) -> set[str]:
    """Compare the gradient at each tap with finite differences in a row of its own; then integrate one. Return the taps at
    which a small change moved the output, which need no noise."""
    inner = [address for address in addresses if not address.startswith("mtp.")]
    whole = {a: x[:1] for a, x in values.items() if not x.is_floating_point() and not a.startswith("mtp.")}
    frozen: dict[str, Replacement] = {a: (lambda x, v=v: v.expand(x.shape)) for a, v in whole.items()}
    out, traced = observed(equal_rows(case, 1), frozen, *inner, grad=True, losses=False)
    weight = torch.randn(out.shape[1:], generator=generator(case.seed, "looking"), dtype=out.dtype)
    tensors = list(traced.values())
    grads = dict(zip(traced, torch.autograd.grad((out * weight).sum(), tensors, allow_unused=True), strict=True))
    directions = {a: torch.randn(traced[a].shape, generator=generator(case.seed, a), dtype=out.dtype) for a in inner}
    slopes = {a: 0.0 if (g := grads[a]) is None else float((g * directions[a]).sum()) for a in inner}
    gaps, moving, left = dict.fromkeys(inner, math.inf), set[str](), inner
    for smaller in (1.0, 1 / 32, 1 / 1024):  # perhaps a kink is within the step
        steps = {a: smaller * 1e-5 / max(abs(slopes[a]), 10.0) for a in left}
        found, moved = _differences(equal_rows(case, len(left)), frozen, directions, weight, steps)
        gaps |= {a: min(gaps[a], abs(d - slopes[a]) / max(abs(slopes[a]), 1.0)) for a, d in found.items()}
        moving |= moved
        if not (left := [a for a in left if not gaps[a] <= DERIVATIVE]):
            break
    for address, gap in gaps.items():
        what = f"{address}: the gradient gives {slopes[address]:.6g}; differences deviate by {gap:.1e} of it"
        case.true(gap <= DERIVATIVE, what)
    of_decoder = [address for address in inner if not address.startswith("encoder.") and not is_state(address)]
    address = of_decoder[zlib.crc32(case.spec.key.encode()) % len(of_decoder)]
    _complete(case, address, values)
    return moving


@torch.no_grad()
def _mixing(case: Case, values: Trace) -> None:
    """Weigh the values of each recurrent mixer that is linear in them by its effective attention."""
    parts = {path: part for path, part, _ in walk(case.spec) if isinstance(part, Mixer) and part.recurrent and part.values}
    heard = Heard({address for address in values if address.rpartition(".")[0] in parts})
    case.run(taps=heard)
    for path, part in parts.items():
        v, y = values[f"{path}.{part.values}"], values[f"{path}.y"]
        v = v.reshape(*v.shape[:3], -1).transpose(1, 2)  # (rows, heads or channels, n, 1 or channel)
        got = (effective(case.model, path, part, heard) @ v).transpose(1, 2).reshape(y.shape)
        case.same(got, y, f"{path}.y: effective attention times {part.values}, and y")


@torch.no_grad()
def _differences(
    wide: Case,
    frozen: Mapping[str, Replacement],
    directions: Mapping[str, Tensor],
    weight: Tensor,
    steps: Mapping[str, float],
) -> tuple[dict[str, float], set[str]]:
    """The finite difference along a direction at each tap of `steps`, each in its row, and the taps that moved the output."""

    def at(by: float) -> Tensor:
        patch: dict[str, Replacement] = {
            f"{a}[row={i}]": (lambda x, a=a, h=by * h: x + h * directions[a]) for i, (a, h) in enumerate(steps.items())
        }
        return observed(wide, {**frozen, **patch}, losses=False)[0] * weight

    above, below = at(1), at(-1)
    found = (above.sum(1) - below.sum(1)) / (2 * torch.tensor(list(steps.values()), dtype=DTYPE))
    differ = _differ(above, below).tolist()
    return dict(zip(steps, found.tolist(), strict=True)), {a for a, d in zip(steps, differ, strict=True) if d}


def _complete(case: Case, address: str, values: Trace) -> None:
    """Integrated gradients at a tap sum to the difference that a small change there makes."""
    value, ctx, elsewhere = values[address], case.ctx(), ("encoder.", "mtp.")
    own: dict[str, Replacement] = {
        name: x for name, x in values.items() if not x.is_floating_point() and not name.startswith(elsewhere)
    }
    weight = torch.randn(case.run().shape, generator=generator(case.seed, "metric"), dtype=DTYPE)

    def metric(out: Tensor) -> Tensor:
        return (out * weight).sum()

    gaps: list[str] = []
    for baseline in (value * (1 - by) for by in SHARES):
        ends: list[Tensor] = []
        with torch.no_grad():
            for x in (value, baseline):
                ctx.taps = Tracer(case.spec, None, {**own, address: x})
                ends.append(metric(case.model(case.inputs, ctx)))
        ctx.taps = None
        parts = integrated_gradients(case.model, case.inputs, address, metric, baseline=baseline, steps=4, ctx=ctx, patch=own)
        total, difference, scale = parts.sum(), ends[0] - ends[1], parts.abs().sum().clamp_min(1e-9)
        if (total - difference).abs() <= SUM * scale:
            break
        gaps.append(f"{address}: integrated gradients sum to {total:.6g}, the difference is {difference:.6g}")
    case.true(len(gaps) < len(SHARES), "; ".join(gaps[:1]))
