"""A case: one spec under test, as a float64 model with perturbed weights, with its inputs and comparisons.

Initial weights hide bugs: attention is nearly uniform, norms are one and biases zero. So every weight is perturbed: norms and
biases by a third, q and k by enough that attention is far from uniform.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from dovetail.construction import build, generator
from dovetail.core.ctx import Ctx, Listener
from dovetail.core.fold import declared
from dovetail.core.layout import TokenLayout
from dovetail.core.module import tensor_at
from dovetail.core.scope import Scope
from dovetail.model import Model, ModelModule
from dovetail.proof.laws.cpu import cpu_seconds
from dovetail.proof.laws.law import Broken, LawCase, Laws, NotApplicable as NotApplicable  # for the files of laws

T = TypeVar("T")
DTYPE = torch.float64
# tolerances relative to the scale of the compared values: bit-equal; float64 relations; finite differences
IDENTITY, RELATION, DERIVATIVE = 0.0, 1e-9, 1e-5
N, BATCH = 21, 3
LENGTHS = (21, 9, 14)
SPREAD = {"embed": 1.0, "updated": 0.05}  # with a larger balancing bias some experts would get no token


class Case(LawCase):
    """One spec under test."""

    clock = staticmethod(cpu_seconds)

    def __init__(self, spec: Model, seed: int = 0, model: ModelModule | None = None, share: int = 1) -> None:
        """`share`: laws that repeat a test (per field, per action) run about one in `share` of the repetitions; the suite tests
        hundreds of specs, so that each repetition still runs on many."""
        super().__init__()
        self.spec, self.seed, self.share = spec, seed, share
        self.scope = spec.axes(Scope())
        self.model = model or perturbed(spec, seed)

    # -- comparing

    def gap(self, what: str) -> None:
        """Raise Broken: the law ends at its first gap."""
        raise Broken(what)

    def same(self, got: Tensor, want: Tensor, what: str, tolerance: float = RELATION) -> None:
        """Require that both are equal within `tolerance` of their scale; a non-finite value is a difference."""
        self.compared += 1
        if got.shape != want.shape:
            self.gap(f"{what}: shapes {tuple(got.shape)} and {tuple(want.shape)}")
        if got.numel() == 0:
            return
        gap, scale = (got - want).abs().max().item(), max(want.abs().max().item(), 1.0)
        if not gap <= tolerance * scale:
            self.gap(f"{what}: differ by {gap:.3g} at scale {scale:.3g}")

    def turn(self, name: str) -> bool:
        """Whether the repetition `name` runs, where one in `share` does; a function of the name and the spec."""
        return zlib.crc32(f"{name} {self.spec.key}".encode()) % self.share == 0

    def taking_turns(self, items: Sequence[T], every: int) -> Sequence[T]:
        """All items; where specs share the work (`share`), one in `every` of them, at least one, a function of the spec."""
        if self.share == 1:
            return items
        return items[zlib.crc32(self.spec.key.encode()) % min(every, len(items)) :: every]

    # -- inputs

    @cached_property
    def inputs(self) -> Tensor:
        """(batch, n) token ids, or images."""
        return self.spec.embed.example(self.scope, BATCH, N, generator(self.seed, "inputs"))

    @cached_property
    def source(self) -> Tensor | None:
        """(batch, n) token ids of the encoder, where there is one."""
        encoder = self.spec.encoder
        return (
            None if encoder is None else encoder.embed.example(encoder.axes(Scope()), BATCH, N, generator(self.seed, "source"))
        )

    @cached_property
    def patches(self) -> Tensor | None:
        """The patches of images that some of the inputs stand for, where the embedding reads any."""
        return self.spec.embed.example_patches(self.scope, generator(self.seed, "patches"))

    @cached_property
    def source_patches(self) -> Tensor | None:
        """The same for the source."""
        encoder = self.spec.encoder
        patches = generator(self.seed, "source patches")
        return None if encoder is None else encoder.embed.example_patches(encoder.axes(Scope()), patches)

    @property
    def tokens(self) -> bool:
        """Whether inputs are token ids, which can be cut, padded and packed."""
        return self.spec.embed.causal()

    def ctx(
        self,
        layout: TokenLayout | None = None,
        source_layout: TokenLayout | None = None,
        source: Tensor | None = None,
        **more: Any,
    ) -> Ctx:
        """The ctx of a forward pass, with the encoder output where the spec has an encoder."""
        layout = layout or TokenLayout.whole(self.inputs.shape[0], N)
        if self.spec.encoder is None or "encoder_output" in more or "views" in more:
            return Ctx(layout=layout, patches=self.patches, **more)
        source = self.source if source is None else source
        assert source is not None
        encoder_output, encoder_layout = self.model.encode(
            source,
            Ctx(
                layout=source_layout or TokenLayout.whole(source.shape[0], source.shape[1]),
                patches=self.source_patches,
                seed=more.get("seed"),
                losses=more.get("losses"),
            ),
        )
        return Ctx(layout=layout, patches=self.patches, encoder_output=encoder_output, encoder_layout=encoder_layout, **more)

    def run(self, inputs: Tensor | None = None, **how: Any) -> Tensor:
        """The model's output."""
        return self.model(self.inputs if inputs is None else inputs, self.ctx(**how))

    def stream(self, inputs: Tensor, ctx: Ctx) -> Tensor:
        """One output per token: of the head, or the residual stream itself where the head pools."""
        if self.spec.head is None or self.spec.head.pools():
            return self.model.hidden(inputs, ctx)[0]
        return self.model(inputs, ctx)

    def listening(self, table: dict[str, Callable[[str, Tensor], Tensor | None]], **how: Any) -> Tensor:
        """The model's output with listeners at some taps."""
        return self.run(listen=Listener(table), **how)

    def gradients(self, loss: Tensor) -> dict[str, Tensor]:
        """The gradient of every parameter, zeros where it has none."""
        named = dict(self.model.named_parameters())
        grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        return {name: torch.zeros_like(p) if g is None else g for (name, p), g in zip(named.items(), grads, strict=True)}


def perturbed(spec: Model, seed: int = 0, dtype: torch.dtype = DTYPE) -> ModelModule:
    """Build the model with perturbed weights, a function of (seed, path)."""
    model = build(spec, dtype=dtype, seed=seed)
    with torch.no_grad():
        for d in declared(spec):
            if d.weight.role == "const" or d.weight.same_as is not None:
                continue
            weight = tensor_at(model, d.path)
            noise = torch.randn(weight.shape, generator=generator(seed, f"perturbed {d.path}"), dtype=torch.float64)
            spread = 1.2 * weight.shape[-1] ** -0.5 if d.weight.matmul else SPREAD.get(d.weight.role, 0.3)
            weight.add_((noise * spread).to(weight.dtype))
    return model


LAWS = Laws()
law = LAWS.law


def rows_of(x: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """The first lengths[i] tokens of row i."""
    return [x[row, :length] for row, length in enumerate(lengths)]
