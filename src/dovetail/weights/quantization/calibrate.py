"""Calibration: what the inputs of each linear leaf look like on a text, layer by layer.

    H = Σ_tokens x xᵀ / tokens        (inp, inp), per expert where there are several; H is all that GPTQ and AWQ need of x:
                                      |x (W − Ŵ)ᵀ|² summed over tokens = tokens · tr((W − Ŵ) H (W − Ŵ)ᵀ)

The leaves of one layer are observed at a time, and replaced before the next layer is, which then sees the activations of the
quantized layers before it. So memory holds the sums of one layer, and a pass ends with the layer that is observed. n layers
cost about n / 2 passes over the text. Leaves that read the same tensor share one H.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.base.errors import SpecError
from dovetail.model.model import Model
from dovetail.model.transformer import Transformer
from dovetail.nn.ctx import Ctx
from dovetail.nn.host import read
from dovetail.nn.linear import Dense, Linear, Offer, Rows
from dovetail.nn.module import evaluating
from dovetail.spec.part import Part
from dovetail.weights.quantization.recipe import leaf_at

Watch = Callable[[int, int], None]  # (steps done, steps in all)


class Inputs:
    """The sum of x xᵀ over the inputs of a leaf, (inp, inp) or (experts, inp, inp), and the number of tokens."""

    def __init__(self, experts: tuple[int, ...], inp: int, device: torch.device) -> None:
        self.sum = torch.zeros(*experts, inp, inp, device=device)
        self.tokens = torch.zeros(experts)

    @property
    def hessian(self) -> Tensor:
        """The mean of x xᵀ; of an expert that no token chose, the identity, as if its inputs were noise."""
        mean = self.sum / self.tokens.clamp(min=1)[..., None, None].to(self.sum.device)
        return torch.where(
            (self.tokens > 0)[..., None, None].to(mean.device), mean, torch.eye(mean.shape[-1], device=mean.device)
        )

    def add(self, x: Tensor) -> None:
        """Add the inputs (rows, inp)."""
        x = x.float()
        self.sum.addmm_(x.T, x)
        self.tokens += len(x)

    def add_grouped(self, x: Tensor, rows: Rows) -> None:
        """Add the inputs (rows, inp) of each expert to its own sum."""
        begin = 0
        for expert, end in enumerate(read(rows.ends)):
            run = x[begin:end].float()
            self.sum[expert].addmm_(run.T, run)
            self.tokens[expert] += end - begin
            begin = end


class Observed(Dense):
    """A dense W whose inputs are added up; without `matrix`, whose inputs would not be seen."""

    exact: frozenset[Offer] = frozenset({"grouped"})

    def __init__(self, seen: Seen, path: str) -> None:
        self.seen, self.path = seen, path

    def multiply(self, leaf: Linear, x: Tensor, ctx: Ctx | None) -> Tensor:
        self.seen.note(self.path, leaf, x, lambda found: found.add(x.flatten(0, -2)))
        return super().multiply(leaf, x, ctx)

    def grouped(self, leaf: Linear, x: Tensor, rows: Rows, ctx: Ctx | None) -> Tensor:
        self.seen.note(self.path, leaf, x, lambda found: found.add_grouped(x, rows))
        return super().grouped(leaf, x, rows, ctx)


class Seen:
    """The inputs of the leaves of one layer, and which module gave each of them."""

    def __init__(self) -> None:
        self.inputs: dict[str, Inputs] = {}  # by the path of the leaf; leaves that read one tensor share theirs
        self.source: dict[str, str] = {}  # leaf -> the module whose output it reads
        self.last: tuple[Tensor, Inputs] | None = None
        self.outputs: dict[str, Tensor] = {}  # the last output of each module that is watched

    def note(self, reader: str, leaf: Linear, x: Tensor, add: Callable[[Inputs], None]) -> None:
        """Add the input of the leaf at the path `reader`; one that was just added by another leaf is not added again."""
        just, shared = (None, None) if self.last is None else self.last
        if reader not in self.inputs:
            experts = tuple(leaf.weight.shape[:-2])
            self.inputs[reader] = shared if just is x and shared else Inputs(experts, x.shape[-1], x.device)
        found = self.inputs[reader]
        if just is not x or shared is not found:
            add(found)
        self.last = (x, found)
        for path, output in self.outputs.items():
            if output is x:
                self.source[reader] = path


class _Reached(Exception):
    """The last layer of interest has run."""


def check_calibrates(spec: Model) -> None:
    """Raise SpecError where token ids alone are no input of the model."""
    if spec.encoder is not None or not spec.embed.causal():
        what = "calibration reads text in a decoder, or an encoder of text"
        raise SpecError("encoder" if spec.encoder is not None else "embed", what, "use the method rtn, which needs none")


@contextlib.contextmanager
def observed(model: nn.Module, paths: Sequence[str], watched: Sequence[str] = ()) -> Iterator[Seen]:
    """Within this context the inputs of the leaves are added up; `watched` are modules whose outputs leaves may read."""
    seen, leaves = Seen(), {path: leaf_at(model, path) for path in paths}
    hooks: list[Any] = []

    def watch(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                seen.outputs[path] = output

        return hook

    for path, leaf in leaves.items():
        leaf.storage = Observed(seen, path)
    hooks = [model.get_submodule(path).register_forward_hook(watch(path)) for path in watched]
    try:
        yield seen
    finally:
        for leaf in leaves.values():
            leaf.storage = Dense()
        for hook in hooks:
            hook.remove()
        seen.outputs.clear()
        seen.last = None


@torch.no_grad()
def run(model: Transformer, batch: Tensor, until: str | None = None) -> Tensor | None:
    """The hidden states of a batch (rows, n), or with `until` what that layer returns, without the layers behind it."""
    if until is None:
        with evaluating(model):
            return model.hidden(batch, model._ctx(batch))[0]
    kept: list[Tensor] = []

    def stop(module: nn.Module, args: Any, output: Any) -> None:
        kept.append(output if isinstance(output, Tensor) else output[0])
        raise _Reached

    hook = model.get_submodule(until).register_forward_hook(stop)
    try:
        with evaluating(model):
            model.hidden(batch, model._ctx(batch))
    except _Reached:
        pass
    finally:
        hook.remove()
    return kept[0] if kept else None


def layers_of(spec: Part, paths: Sequence[str]) -> dict[str, list[str]]:
    """The leaves by the layer that holds them, in order: `layers.3` of `layers.3.mixer.q`; others by themselves."""
    found: dict[str, list[str]] = {}
    for path in paths:
        names = path.split(".")
        numbers = [i for i, name in enumerate(names) if name.isdigit()]
        found.setdefault(".".join(names[: numbers[0] + 1]) if numbers else path, []).append(path)
    return found
