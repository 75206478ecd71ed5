"""A case: one spec under test, as a float64 model with perturbed weights, with its inputs and comparisons.

Initial weights hide bugs: attention is nearly uniform, norms are one and biases zero. So every weight is perturbed: norms and
biases by a third, q and k by enough that attention is far from uniform.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from dovetail.model.construction import build, generator
from dovetail.model.model import Model, ModelModule
from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout
from dovetail.nn.module import tensor_at
from dovetail.proof.laws.law import Broken, LawCase, Laws, NotApplicable as NotApplicable, cpu_seconds  # for the files of laws
from dovetail.spec.fold import declared
from dovetail.spec.scope import Scope

T = TypeVar("T")
DTYPE = torch.float64
# tolerances relative to the scale of the compared values: bit-equal; float64 relations; finite differences
IDENTITY, RELATION, DERIVATIVE = 0.0, 1e-9, 1e-5
N, BATCH = 21, 3
LENGTHS = (21, 9, 14)
SPREAD = {"embed": 1.0, "updated": 0.05}  # with a larger balancing bias some experts would get no token


class Case(LawCase):
    """One spec under test."""

    def __init__(
        self, spec: Model, seed: int = 0, model: ModelModule | None = None, share: int = 1, rows: int = BATCH, n: int = N
    ) -> None:
        """`share`: laws that repeat a test (per field, per action) run about one in `share` of the repetitions; the suite tests
        hundreds of specs, so that each repetition still runs on many. `rows`, `n`: the size of the inputs."""
        super().__init__()
        self.spec, self.seed, self.share, self.rows, self.n = spec, seed, share, rows, n
        self.scope = spec.axes(Scope())
        self.model = model or perturbed(spec, seed)
        self.device = next(self.model.parameters()).device

    def of(self, model: ModelModule) -> Case:
        """The same case with another model."""
        return Case(self.spec, self.seed, model)

    def of_spec(self, model: ModelModule) -> Case:
        """A case with a model of another spec that reads the same inputs."""
        return Case(model.part, self.seed, model, self.share, self.rows, self.n)

    # -- comparing

    def clock(self) -> float:
        return cpu_seconds()

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

    def alternating(self, items: Sequence[T], every: int) -> Sequence[T]:
        """All items; where specs share the work (`share`), one in `every` of them, at least one, a function of the spec."""
        if self.share == 1:
            return items
        return items[zlib.crc32(self.spec.key.encode()) % min(every, len(items)) :: every]

    # -- inputs, in the dtype and on the device of the model

    def moved(self, x: Tensor) -> Tensor:
        """A tensor on the model's device, and in its dtype unless it holds integers."""
        return x.to(self.device, self.model.dtype if x.is_floating_point() else None)

    def _example(self, spec: Model, name: str) -> Tensor:
        return self.moved(spec.embed.example(spec.axes(Scope()), self.rows, self.n, generator(self.seed, name)))

    def _patches(self, spec: Model | None, name: str) -> Tensor | None:
        patches = None if spec is None else spec.embed.example_patches(spec.axes(Scope()), generator(self.seed, name))
        return None if patches is None else self.moved(patches)

    @cached_property
    def inputs(self) -> Tensor:
        """(batch, n) token ids, or images."""
        return self._example(self.spec, "inputs")

    @cached_property
    def source(self) -> Tensor | None:
        """(batch, n) token ids of the encoder, where there is one."""
        return None if self.spec.encoder is None else self._example(self.spec.encoder, "source")

    @cached_property
    def patches(self) -> Tensor | None:
        """The patches of images that some of the inputs stand for, where the embedding reads any."""
        return self._patches(self.spec, "patches")

    @cached_property
    def source_patches(self) -> Tensor | None:
        """The same for the source."""
        return self._patches(self.spec.encoder, "source patches")

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
        layout = layout or TokenLayout.whole(self.inputs.shape[0], self.n, self.device)
        if self.spec.encoder is None or "encoder_output" in more or "views" in more:
            return Ctx(layout=layout, patches=self.patches, **more)
        source = self.source if source is None else source
        assert source is not None
        encoder_output, encoder_layout = self.model.encode(
            source,
            Ctx(
                layout=source_layout or TokenLayout.whole(source.shape[0], source.shape[1], self.device),
                patches=self.source_patches,
                draws=more.get("draws"),
                taps=more.get("taps"),
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


class Arrangement(NamedTuple):
    """A way to put sequences of LENGTHS into one batch: padded on either side, packed into one row or two, or flat."""

    what: str  # with the number of a sequence: `row {} padded on the left`
    shape: tuple[int, ...]  # of the tokens of the batch
    places: Sequence[tuple[int | slice, ...]]  # of each sequence in it
    make: Callable[[], TokenLayout]

    def join(self, sequences: Sequence[Tensor], padding: int = 1) -> Tensor:
        """The batch of these sequences (n, …); the padding token is an ordinary one: it must not matter which."""
        batch = sequences[0].new_full((*self.shape, *sequences[0].shape[1:]), padding)
        for place, sequence in zip(self.places, sequences, strict=True):
            batch[place] = sequence
        return batch

    def split(self, batch: Tensor) -> list[Tensor]:
        """The sequences of a batch, without padding."""
        return [batch[place] for place in self.places]


SPANS = [slice(end - length, end) for end, length in zip(accumulate(LENGTHS), LENGTHS, strict=True)]
ARRANGEMENTS = (
    Arrangement(
        "row {} padded on the right",
        (BATCH, N),
        [(row, slice(0, length)) for row, length in enumerate(LENGTHS)],
        lambda: TokenLayout.padded(LENGTHS, N),
    ),
    Arrangement(
        "row {} padded on the left",
        (BATCH, N),
        [(row, slice(N - length, N)) for row, length in enumerate(LENGTHS)],
        lambda: TokenLayout.padded(LENGTHS, N, left=True),
    ),
    Arrangement(
        "document {} packed",
        (1, sum(LENGTHS)),
        [(0, span) for span in SPANS],
        lambda: TokenLayout.packed([LENGTHS], sum(LENGTHS)),
    ),
    Arrangement(
        "document {} packed, with another row",
        (2, sum(LENGTHS[:2])),
        [(0, SPANS[0]), (0, SPANS[1]), (1, slice(0, LENGTHS[2]))],
        lambda: TokenLayout.packed([LENGTHS[:2], LENGTHS[2:]], sum(LENGTHS[:2])),
    ),
    Arrangement("row {} in a flat batch", (sum(LENGTHS),), [(span,) for span in SPANS], lambda: TokenLayout.flat(LENGTHS)),
)
