"""Law 9, adapted: an adapter acts on every path, and on nothing else.

    a fresh adapter is the identity, leaf by leaf bit for bit      every targeted leaf is adapted: n applied = n targeted
    every call of a leaf has the ctx                      from which an adapter draws its dropout in training
    adapted = merged = saved and loaded                   an optimizer trains the adapter's tensors and no other
    each leaf, perturbed alone, changes every path        in a batch with several adapters each row has its own

All linear leaves that can be adapted are, readouts included, by LoRA, DoRA and (IA)³ in turn. Paths are those of law 23: the
reference kernels and the fast ones, the loss, a KV cache fed token by token (MLA decodes in its absorbed form), here also with
leaves that are fused for inference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dovetail.model.construction import generator
from dovetail.model.model import ModelModule
from dovetail.nn.ctx import Ctx
from dovetail.nn.declared_tensors import adapted_leaves
from dovetail.nn.fused import fuse
from dovetail.nn.groups import Embed, Head
from dovetail.nn.linear import Linear
from dovetail.nn.module import tensor_at
from dovetail.proof.laws.case import BATCH, IDENTITY, Case, NotApplicable, law, perturbed
from dovetail.proof.laws.replaced import on_paths, paths
from dovetail.spec.fold import Declared
from dovetail.training.optim import Optimizer
from dovetail.weights.adapters import attach as attaching, multi_lora
from dovetail.weights.adapters.attach import Applied, adaptable, attach, detach, merge
from dovetail.weights.adapters.kind import AdapterKind
from dovetail.weights.adapters.lora import Lora
from dovetail.weights.adapters.storage import adapter_tensors, set_adapter

KINDS = (
    {"kind": "lora", "rank": 3, "alpha": 5.0, "dropout": 0.3},  # off outside training
    {"kind": "dora", "rank": 2, "scale": "root"},
    {"kind": "ia3"},
)
SPREAD = 0.4  # of what is added to an adapter: enough that no output stays the same
FELT = 1e-7  # of the scale of an output: the least change that is one
SATURATED = 1e-12  # of the largest gradient of a model in float64: rounding
EVERY_WEIGHT = "every_weight"  # law 16
CALLS = ("forward", "grouped", "matrix")  # what parts call of a leaf
EVERY = 8  # one in so many leaves of each spec is perturbed alone


@law(
    9,
    "adapted",
    "a fresh adapter is the identity; adapted, merged and loaded are equal; each adapted leaf takes effect on every path",
    covers="values",
    budget=2.5,
)
@torch.no_grad()
def adapted(case: Case) -> None:
    """Every kind of adapter on all leaves; in the suite, one kind, and some leaves alone."""
    leaves = adaptable(case.spec)
    if not leaves:
        raise NotApplicable("the spec has no linear leaf")
    plain = paths(case)
    for fields in case.alternating(KINDS, len(KINDS)):
        kind = attaching.read_adapter({**fields, "targets": [path for path, _ in leaves]})
        _whole(case, kind, plain)
        _each(case, kind, plain)
    by_row = [path for path, d in leaves if not isinstance(d.part, Embed)]  # patches of images are no rows
    if by_row:
        _rows(case, by_row)


def _whole(case: Case, kind: AdapterKind, plain: dict[str, Tensor]) -> None:
    """All leaves adapted at once."""
    model = perturbed(case.spec, case.seed)
    applied = attach(model, kind, seed=case.seed)
    found = [path for path, _ in adapted_leaves(model)]
    case.true(applied.targeted == len(found) == len(applied.paths), f"{applied}, but {len(found)} leaves have an adapter")
    _trained(case, model)
    with _compared(case, model, kind.kind):
        fresh = _paths(case, model)
    for name, output in fresh.items():  # a whole pass repeats to the last bits at most: its sums depend on addresses
        case.same(output, plain[name], f"{name}: a fresh {kind.kind} and no adapter")
    perturb(model, case.seed)
    fuse(model)
    got = _paths(case, model)
    again = perturbed(case.spec, case.seed)
    attach(again, kind, seed=case.seed + 1)
    set_adapter(again, adapter_tensors(model))
    for name, output in _paths(case, again).items():
        case.same(output, got[name], f"{name}: {kind.kind} loaded and saved")
    merge(model)
    for name, output in _paths(case, model).items():
        case.same(output, got[name], f"{name}: {kind.kind} merged and not")


@contextmanager
def _compared(case: Case, model: ModelModule, kind: str) -> Iterator[None]:
    """Compare each call of an adapted leaf with the same call of the leaf without its adapter, bit for bit."""
    leaves = list(adapted_leaves(model))
    for path, leaf in leaves:
        for name in CALLS:
            setattr(leaf, name, _both(case, leaf, getattr(leaf, name), f"{path}: {name} of a fresh {kind} and of no adapter"))
    yield
    for _, leaf in leaves:
        for name in CALLS:
            delattr(leaf, name)


def _both(case: Case, leaf: Linear, call: Callable[..., Tensor], what: str) -> Callable[..., Tensor]:
    def run(*given: Any) -> Tensor:
        case.true(isinstance(given[-1], Ctx), f"{what}: is called without the ctx, so that its adapter draws no dropout")
        got, adapter = call(*given), leaf.adapter
        leaf.adapter = None
        want = call(*given)
        leaf.adapter = adapter
        case.same(got, want, what, IDENTITY)
        return got

    return run


def _trained(case: Case, model: ModelModule) -> None:
    """An optimizer has the tensors of the adapters, which alone take a gradient."""
    own = set(adapter_tensors(model))
    idle = {path for path, d in adaptable(case.spec) if _idle(d)}
    takes = {path for path, parameter in model.named_parameters() if parameter.requires_grad}
    case.true(takes == own, f"{sorted(takes ^ own)[:1]}: takes a gradient, or is an adapter's: one of both")
    case.true(set(Optimizer(model).weights) == own, "the optimizer trains other tensors than the adapters'")
    _backward(case, model)
    for path, leaf in adapted_leaves(model):
        assert leaf.adapter is not None
        if leaf.adapter.declared[0].scope.drafts or path in idle:
            continue
        moved = any(_largest(parameter.grad) > 0 for parameter in leaf.adapter.parameters())
        what = f"{path}: no tensor of its fresh adapter has a gradient, so that it cannot learn"
        case.true(moved or _saturated(case, path), what)
    model.zero_grad()


def _saturated(case: Case, path: str) -> bool:
    """Whether the weight of a leaf itself takes no gradient, so that its adapter cannot either: the queries and keys of random
    features, if all keys are so large that their features are at the floor."""
    model = perturbed(case.spec, case.seed).requires_grad_(True)
    _backward(case, model)
    own = max(_largest(parameter.grad) for parameter in model.get_submodule(path).parameters())
    largest = max(_largest(parameter.grad) for parameter in model.parameters())
    case.true(largest > 0, "no weight of the model has a gradient")  # else every leaf would count as saturated
    return own <= SATURATED * largest


def _largest(gradient: Tensor | None) -> float:
    return 0.0 if gradient is None else gradient.abs().max().item()


def _backward(case: Case, model: ModelModule) -> None:
    """Gradients of a random projection of the outputs."""
    with torch.enable_grad():
        run = case.of(model)
        outputs = [run.run()]
        if case.spec.head is not None and case.spec.head.pools():  # the first token is not reached by all that others are
            outputs.append(run.stream(case.inputs, run.ctx()))
        draws = generator(case.seed, "projection")
        torch.stack(
            [(out * torch.randn(out.shape, generator=draws, dtype=out.dtype)).sum() for out in outputs]
        ).sum().backward()


def _each(case: Case, kind: AdapterKind, plain: dict[str, Tensor]) -> None:
    """Some leaves, each alone."""
    leaves = case.alternating(adaptable(case.spec), EVERY)
    model = perturbed(case.spec, case.seed)
    pools = case.spec.head is not None and case.spec.head.pools()
    streams = _streams(case.of(model)) if pools else {}
    attach(model, kind, seed=case.seed)
    fresh = {path: tensor.clone() for path, tensor in adapter_tensors(model).items()}
    for path, d in leaves if case.share > 1 else leaves[:: max(1, len(leaves) // EVERY)]:
        if _idle(d):
            continue
        set_adapter(model, fresh)
        perturb(model, case.seed, only=path)
        # a head that pools reads one token, perhaps the first, which many leaves do not reach: compare the residual stream
        inside = pools and not isinstance(d.part, Head)
        outputs, before = (_streams(case.of(model)), streams) if inside else (_paths(case, model), plain)
        for name, output in outputs.items():
            if d.scope.drafts and name != "loss":
                continue  # it runs in training and drafting alone
            if pools and not inside and name == "cached":
                continue  # the residual stream, before the head
            change = (output - before[name]).abs().max().item() / max(before[name].abs().max().item(), 1.0)
            what = f"{name}: the {kind.kind} of {path} alone changes nothing ({change:.1g})"
            case.true(change > FELT or _saturated(case, path), what)


def _idle(d: Declared) -> bool:
    """Whether its part declares that some weight changes nothing: the router of a single expert."""
    return EVERY_WEIGHT in d.part.proof.excepts(d.part, d.scope)


def _rows(case: Case, targets: list[str]) -> None:
    """A batch whose rows have different adapters, of different ranks and factors, or none, against each alone."""
    model = perturbed(case.spec, case.seed)
    alone: dict[str | None, Tensor] = {None: case.of(model).run()}
    several: list[tuple[str, Lora, dict[str, Tensor]]] = []
    for rank, alpha in ((2, 5.0), (3, 10.0)):
        kind, name = Lora(rank=rank, alpha=alpha, dropout=0.0, targets=tuple(targets)), f"rank {rank}"
        attach(model, kind, seed=case.seed)
        perturb(model, case.seed + rank)
        several.append((name, kind, {path: tensor.clone() for path, tensor in adapter_tensors(model).items()}))
        alone[name] = case.of(model).run()
        detach(model)
    bank = multi_lora.Bank(model)
    for one in several:
        bank.load(*one)
    names = [list(alone)[(row + 1) % len(alone)] for row in range(BATCH)]
    with bank.rows(names):
        got = case.of(model).run()
    for row, name in enumerate(names):
        case.same(got[row], alone[name][row], f"row {row} of a batch with several adapters, and {name} alone")


def _paths(case: Case, model: ModelModule) -> dict[str, Tensor]:
    return paths(case.of(model))


def _streams(case: Case) -> dict[str, Tensor]:
    """The residual stream after the last layer on every path that has one."""
    return on_paths(case, lambda: case.stream(case.inputs, case.ctx()))


@torch.no_grad()
def perturb(model: ModelModule, seed: int, only: str | None = None) -> None:
    """Add noise to every adapter, or to that of one leaf: a function of (seed, path)."""
    for path in adapter_tensors(model):
        if only is None or path.startswith(f"{only}.adapter."):
            tensor = tensor_at(model, path)
            noise = torch.randn(tensor.shape, generator=generator(seed, f"adapted {path}"), dtype=torch.float64)
            tensor.add_((SPREAD * noise).to(tensor.dtype))


__all__ = ["Applied", "adapted", "perturb"]
