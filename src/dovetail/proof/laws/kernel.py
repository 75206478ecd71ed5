"""Laws of arithmetic: fast = reference (6), gradient (12), every weight counts (16)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy

import torch
from torch import Tensor

from dovetail.model.construction import build, generator
from dovetail.model.model import ModelModule
from dovetail.nn.ctx import Losses
from dovetail.nn.fused import fuse
from dovetail.nn.groups import Mixer
from dovetail.nn.layout import TokenLayout
from dovetail.ops import attend, attend_tiled, implementation
from dovetail.proof.laws.case import BATCH, DERIVATIVE, DTYPE, Broken, Case, N, NotApplicable, law, perturbed
from dovetail.proof.laws.law import LawCase
from dovetail.spec.fold import declared, needs_of
from dovetail.spec.part import walk_spec

DRAWS = 6  # perturbations and inputs after which a weight without a gradient is a failure


@contextmanager
def small_tiles(tile: int = 8, piece: int = 16, chunk: int = 4) -> Iterator[None]:
    """Use tiles and chunks so small that a short sequence has many; as execution settings they must not change results."""
    old = attend_tiled.TILE, attend_tiled.PIECE, implementation.CHUNK
    attend_tiled.TILE, attend_tiled.PIECE, implementation.CHUNK = tile, piece, chunk
    try:
        yield
    finally:
        attend_tiled.TILE, attend_tiled.PIECE, implementation.CHUNK = old


def scalar(case: Case, layout: TokenLayout, ahead: bool = True) -> Tensor:
    """A scalar that depends on the output of every real token, and on the losses that parts add; without those of multi-token
    prediction where not `ahead`."""
    losses = Losses()
    ctx = case.ctx(layout=layout, losses=losses)
    out = case.stream(case.inputs, ctx)
    weight = torch.randn(out.shape, generator=generator(case.seed, "probe"), dtype=DTYPE)
    if out.dim() == layout.seg.dim() + 1 and out.shape[1] == layout.n:
        weight = weight * layout.real[..., None]
    losses.by_path = {path: loss for path, loss in losses.by_path.items() if ahead or not path.startswith("mtp.")}
    return ctx.with_added((out.sin() * weight).sum())


@law(6, "fast", "every applicable backend equals the reference implementation, forward and backward")
def fast(case: Case) -> None:
    """Compare outputs and all gradients, on whole sequences and on packed documents with padding; then fused leaves."""
    if case.turn("joined"):
        _fused(case)
    needs = needs_of(case.spec)
    able = [backend.name for backend in attend.offering(needs) if backend.name != "reference"]
    if not able:
        raise NotApplicable("only the reference implementation offers what this spec needs")
    documents = TokenLayout.packed([(9, 12), (14,), (5, 9, 4)], N)
    for layout in (TokenLayout.whole(BATCH, N), documents) if case.tokens else (TokenLayout.whole(BATCH, N),):
        with attend.using("reference"):
            want = scalar(case, layout)
            want_grads = case.gradients(want)
        for name in able:
            with attend.using(name), small_tiles():
                got = scalar(case, layout)
                case.same(got.detach(), want.detach(), f"{name} and reference")
                for path, grad in case.gradients(got).items():
                    case.same(grad, want_grads[path], f"{name} and reference: gradient of {path}")
    _in_float32(case, able)


@torch.no_grad()
def _fused(case: Case) -> None:
    """Leaves that are multiplied at once equal the leaves, also after their weights were replaced by other tensors."""
    model, other = perturbed(case.spec, case.seed), perturbed(case.spec, case.seed + 1)
    if fuse(model):
        case.same(case.of(model).run(), case.run(), "leaves fused and apart")
        model.load_state_dict(other.state_dict(), assign=True)
        fused, apart = (case.of(one).run() for one in (model, other))
        case.same(fused, apart, "leaves fused and apart, with other weights")


@torch.no_grad()
def _in_float32(case: Case, able: list[str]) -> None:
    """|fast in float32 − reference in float64| ≤ 4 · |reference in float32 − reference in float64| + 4 ulp.

    It is 16 instead of 4 where recurrences run in chunks, which solve triangular systems and rescale by decays: three such
    layers gave a factor of 10."""
    recurs = any(isinstance(part, Mixer) and part.recurrent for _, part in walk_spec(case.spec))
    times = 16 if recurs else 4
    single = build(case.spec, seed=case.seed)
    tensors = ([*model.parameters(), *model.buffers()] for model in (single, case.model))
    for narrow, exact in zip(*tensors, strict=True):
        narrow.copy_(exact)
    rounded = Case(case.spec, case.seed, deepcopy(single).double())
    ctx = rounded.ctx()
    with attend.using("reference"):
        want = rounded.stream(rounded.inputs, ctx)
        ulp = torch.finfo(torch.float32).eps * float(want.abs().max())
        error = _error(case, single, want)
    for name in able:
        with attend.using(name), small_tiles():
            fast_error = _error(case, single, want)
        message = f"{name} in float32 has an error of {fast_error:.3g}, the reference of {error:.3g}"
        case.true(fast_error <= times * error + times * ulp, message)


def _error(case: Case, single: ModelModule, want: Tensor) -> float:
    in_single = case.of(single)
    return float((in_single.stream(in_single.inputs, in_single.ctx()).double() - want).abs().max())


def of_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Floating-point tensors in this dtype; integer tensors unchanged."""
    return x.to(dtype) if x.is_floating_point() else x


@law(12, "gradient", "directional derivatives agree with finite differences")
def gradient(case: Case) -> None:
    """Compare the derivative along one random direction through all parameters. A depth that learns what the model computes
    takes it as a constant, which differences along the model's parameters would move: its loss has a direction of its own."""
    layout = TokenLayout.packed([(9, 12), (14,), (5, 9, 4)], N) if case.tokens else TokenLayout.whole(BATCH, N)
    weights = dict(case.model.named_parameters())
    constants = any(depth.loss_terms().keys() - {"labels"} for depth in case.spec.mtp)
    compare_derivatives(case, weights, lambda: scalar(case, layout, ahead=not constants), case.seed)
    if constants:
        own = {path: weight for path, weight in weights.items() if path.startswith("mtp.")}
        compare_derivatives(case, own, lambda: scalar(case, layout), case.seed)


def compare_derivatives(case: LawCase, weights: Mapping[str, Tensor], scalar: Callable[[], Tensor], seed: int) -> None:
    """Require that the derivative of a scalar along one random direction of the weights is that of finite differences."""
    direction = {
        name: torch.randn(p.shape, generator=generator(seed, f"direction {name}"), dtype=p.dtype) for name, p in weights.items()
    }
    grads = torch.autograd.grad(scalar(), list(weights.values()), allow_unused=True)
    slope = sum(float((g * direction[name]).sum()) for name, g in zip(weights, grads, strict=True) if g is not None)

    @torch.no_grad()
    def moved(by: float) -> float:
        for name, p in weights.items():
            p.add_(direction[name], alpha=by)
        value = float(scalar())
        for name, p in weights.items():
            p.sub_(direction[name], alpha=by)
        return value

    def by_differences(step: float) -> float:
        coarse, fine = ((moved(k * step) - moved(-k * step)) / (2 * k * step) for k in (2, 1))
        return (4 * fine - coarse) / 3  # Richardson extrapolation: two step sizes cancel the error of second order

    # a steep function also curves more, and its kinks are closer
    step, gap = 1e-5 / max(abs(slope), 10.0), float("inf")
    for smaller in (1, 32, 1024):  # perhaps a kink, or a change of experts, is within the step
        gap = min(gap, abs(by_differences(step / smaller) - slope) / max(abs(slope), 1.0))
        if gap <= DERIVATIVE:
            break
    case.true(gap <= DERIVATIVE, f"autograd gives {slope:.6g}; finite differences deviate by {gap:.1e} of it")


@law(16, "every_weight", "each declared weight, and each expert, has a gradient above rounding")
def every_weight(case: Case) -> None:
    """Check for a gradient on several inputs, so that every row of a table is read and every expert gets a token."""
    if case.spec.head is None:
        raise NotApplicable("no head")
    silent = _silent(case)
    for seed in range(case.seed + 1, case.seed + DRAWS):  # one sample may saturate a gate, or leave an expert without a token
        if not silent:
            break
        silent &= _silent(Case(case.spec, seed))
    if silent:  # perturbed weights without a norm can make a stream so large that all random features are at their floor
        silent &= _silent(Case(case.spec, case.seed, build(case.spec, dtype=DTYPE, seed=case.seed)))
    case.true(not silent, f"{', '.join(sorted(silent)[:3])} has no gradient")


def _silent(case: Case) -> set[str]:
    """Weights, and experts among them, without a gradient above rounding."""
    # the scalar reaches the tokens that a pooling head does not read
    grads = case.gradients(loss_of(case) + 0.01 * scalar(case, TokenLayout.whole(BATCH, N)))
    scale = max(float(g.abs().max()) for g in grads.values())
    batches = {d.path: len(d.weight.batch) for d in declared(case.spec)}
    largest = {path: grad.abs().reshape(*grad.shape[: batches[path]], -1).amax(-1) for path, grad in grads.items()}
    # not (each ≤ …), so that NaN counts as no gradient
    return {f"{path}{index or ''}" for path, each in largest.items() for index in (~(each > 1e-13 * scale)).nonzero().tolist()}


def loss_of(case: Case) -> Tensor:
    """The head's loss on random labels, plus the losses that parts add."""
    head = case.spec.head
    assert head is not None
    ctx = case.ctx(losses=Losses())
    x, ctx = case.model.hidden(case.inputs, ctx)
    shape = x.shape[:1] if head.pools() else x.shape[:2]
    labels = head.labels(case.scope, tuple(shape), generator(case.seed, "labels"))
    loss = ctx.with_added(case.model.head.loss(x, labels, ctx).mean())
    if not bool(loss.isfinite()):
        raise Broken("the loss is not finite")
    return loss
