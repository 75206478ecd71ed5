"""AdapterKind: the group of adapters. A kind declares its tensors from the declared weight of a linear leaf.

    base (batch…, out, inp)   ->   lora: a (batch…, rank, inp), b (batch…, out, rank)

From named axes follow initialization, sharding, optimizer groups and checkpoints, as for every weight. A target is a pattern of
leaf paths (`layers.*.mixer.q`), the end of one (`q`, `mixer.*`), or a role: `linear` means every matrix that tokens are
multiplied by, but for readouts (the head over the vocabulary, the scores of experts). "LoRA without regret" (Schulman et al.
2025) adapts all of these: attention alone learns less at an equal number of parameters.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Literal, cast

from torch import Tensor, nn

from dovetail.nn.linear import Adapter, Linear, Offer
from dovetail.spec.fold import Declared
from dovetail.spec.part import Part, join
from dovetail.spec.scope import Scope
from dovetail.spec.weight import Weight

Tp = Literal["auto", "replicate", "once", "reduce", "inside"]


@dc.dataclass(frozen=True, kw_only=True, repr=False)
class AdapterKind(Part):
    """Changes what linear leaves compute. Module: an AdapterModule, one per leaf."""

    group: ClassVar[str] = "adapter"

    targets: tuple[str, ...] = ("linear",)

    @classmethod
    def from_short_form(cls, data: Any) -> Any:
        data = super().from_short_form(data)
        if isinstance(data, Mapping) and isinstance(data.get("targets"), str):
            return {**cast("Mapping[str, Any]", data), "targets": [data["targets"]]}
        return data

    def adapter(self) -> type[AdapterModule]:
        """The module that computes it."""
        raise NotImplementedError

    def tensors(self, base: Declared) -> list[Weight]:
        """The tensors that adapt one leaf, from its declared weight; names have no dot."""
        raise NotImplementedError

    def sizes(self) -> dict[str, int]:
        """The axes that it adds to those of the leaf."""
        return {}

    def matches(self, target: str, d: Declared) -> bool:
        """Whether a target means the leaf of this weight."""
        path = leaf_path(d)
        return fnmatchcase(path, target) or fnmatchcase(path, f"*.{target}") or self.means(target, d)

    def means(self, role: str, d: Declared) -> bool:
        """Whether a role means the leaf."""
        return role == d.weight.role and not d.weight.readout

    def declare(self, base: Declared) -> tuple[Declared, ...]:
        """The declared tensors of the adapter of a leaf, under their paths in the model."""
        scope, at = dc.replace(base.scope.add(**self.sizes()), init=self), join(leaf_path(base), "adapter")
        return tuple(Declared(join(at, w.name), w, scope, self) for w in self.tensors(base))

    # -- the init of its own tensors (spec/scope.py)
    def std(self, weight: Weight, scope: Scope) -> float:
        """The standard deviation of tensors that are sampled from a normal distribution."""
        return scope.size(*weight.inp) ** -0.5

    def lr_scale(self, weight: Weight, scope: Scope) -> float:
        """The factor of the learning rate: that of a model's own init holds for its matrices, not for these."""
        return 1.0


def leaf_path(d: Declared) -> str:
    """The path of the linear leaf that has a declared weight."""
    return d.path.removesuffix(".weight")


def tp_of(base: Declared) -> Tp:
    """How the factors of an adapter are sharded: as the weight. In a part that enters its region itself (a head over the
    vocabulary), a factor that is not sharded is inside of it."""
    own = base.scope.names((*base.weight.out, *base.weight.inp))
    return "inside" if base.weight.tp == "auto" and set(base.part.tp_axes) & set(own) else base.weight.tp


class AdapterModule(Adapter):
    """The parameters of one leaf's adapter, on the leaf's device."""

    exact: frozenset[Offer] = frozenset({"grouped", "matrix"})

    def __init__(self, kind: Any, declared: tuple[Declared, ...], values: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.kind, self.declared = kind, declared
        for name, value in values.items():
            self.register_parameter(name, nn.Parameter(value))
        self.setup()

    def setup(self) -> None:
        """Compute once what every forward pass needs."""

    def extra_repr(self) -> str:
        """Its kind."""
        return repr(self.kind)

    def delta(self, leaf: Linear) -> Tensor | None:
        """ΔW where the adapted leaf multiplies by W + ΔW; None where it does something else."""
        return None
