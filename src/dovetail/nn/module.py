"""Module: the base class that creates a part's parameters, buffers and children from its declarations.

A part's module class therefore contains little but `forward`. All tensors are created on the meta device;
`model/construction.py` allocates and initializes them.

Evaluation mode for the time of a call: generation, embeddings and measurements never have dropout.

    with evaluating(model):              model.training is False here, in every module
        logits = model(ids)
                                         each module is in the mode that it was in, also after an exception

A pass draws random numbers if the root is in training mode (`Ctx.for_mode`). If it is not, nothing is changed.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from dovetail.nn.linear import FusedWeight, Linear
from dovetail.spec.part import Part, join, weights_of
from dovetail.spec.scope import Scope
from dovetail.spec.weight import State, Weight

ENTRY = "_nested_entry"  # the mark of a method that `entry` marks
F = TypeVar("F", bound=Callable[..., Any])


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which norms, softmax and rotary angles are computed: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def stored_dtype(state: State, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a decode state is stored, in a model of this dtype."""
    if state.dtype == "int64":
        return torch.int64
    return at_least_fp32(dtype) if state.at_least_fp32 else dtype


def entry(*, nested: bool = False) -> Callable[[F], F]:
    """Mark a method beside `forward` by which a module is run from outside: ranks run it in the way of a forward pass
    (parallel/shard.py). A nested one is called by other entries, and may be called by itself where FSDP gathers nothing."""

    def mark(method: F) -> F:
        setattr(method, ENTRY, nested)
        return method

    return mark


def entries(cls: type[nn.Module], nested: bool = False) -> list[str]:
    """The names of the methods that `entry` marks in a class or its bases, in order; the nested ones too if asked for."""
    marks = {
        name: getattr(value, ENTRY) for base in reversed(cls.__mro__) for name, value in vars(base).items() if _marked(value)
    }
    return [name for name, inner in marks.items() if nested or not inner]


def _marked(value: Any) -> bool:
    return callable(value) and getattr(value, ENTRY, None) is not None


class Module(nn.Module):
    """Parameters, constants and children of one part, on the meta device."""

    # names of linear leaves that read one input (`q` of `q.weight`), set in `setup`: inference may multiply by all at once
    fused: tuple[str, ...] = ()
    fused_weight: FusedWeight | None = None  # theirs, once `nn/fused.py` has made it

    def __init_subclass__(cls, of: type[Part] | None = None) -> None:
        """`of`: the part that this class computes."""
        super().__init_subclass__()
        if of is not None:
            of.module = cls

    def __init__(self, part: Any, scope: Scope) -> None:
        super().__init__()
        scope = part.axes(scope)
        self.part, self.scope, self.path = part, scope, scope.path
        weights = weights_of(part, scope)
        names = {w.name for w in weights}
        for weight in weights:
            self._declare(weight, names)
        for name, child in part.children().items():
            self._add_child(name, make(child, part.child_scope(scope, name).at_path(f"{scope.path}.{name}".lstrip("."))))
        self.setup()

    def setup(self) -> None:
        """Compute once what every forward pass needs."""

    def extra_repr(self) -> str:
        """The fields of the part that hold no part: what the names of its submodules do not show."""
        fields = ((f.name, getattr(self.part, f.name)) for f in dc.fields(self.part))
        return ", ".join(
            f"{name}={value!r}" for name, value in fields if value is not None and not isinstance(value, (Part, tuple))
        )

    def _declare(self, weight: Weight, names: set[str]) -> None:
        stem, dot, leaf = weight.name.partition(".")
        shape = weight.shape(self.scope)
        if dot and leaf == "weight":
            self.add_module(stem, Linear(shape, f"{stem}.bias" in names, join(self.path, stem)))
        elif weight.buffer:
            dtype = torch.int64 if weight.dtype == "int64" else None
            self.register_buffer(weight.name, torch.empty(shape, dtype=dtype, device="meta"), persistent=weight.stored)
        elif not dot:
            self.register_parameter(weight.name, nn.Parameter(torch.empty(shape, device="meta")))

    def _add_child(self, name: str, module: nn.Module) -> None:
        """Append `layers.3` to a ModuleList called `layers`; make any other name an attribute."""
        stem, dot, _ = name.partition(".")
        if not dot:
            self.add_module(name, module)
            return
        if stem not in self._modules:
            self.add_module(stem, nn.ModuleList())
        items = self._modules[stem]
        assert isinstance(items, nn.ModuleList)
        items.append(module)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Constants and buffers stay in float32 when a model is cast to a narrower dtype: rotary frequencies in bfloat16 would
        be off by a radian within 500 positions. In a wider dtype constants are computed again: they follow from the spec, so a
        model that was cast to float64 equals one that was built or loaded in it."""
        self.fused_weight = None  # the weights are new tensors
        wide = {name: buffer for name, buffer in self._buffers.items() if buffer is not None and buffer.is_floating_point()}
        super()._apply(fn, recurse)
        for name, buffer in wide.items():
            new = self._buffers[name]
            if new is not None and new.dtype.itemsize < 4:
                self._buffers[name] = buffer.to(new.device, at_least_fp32(new.dtype))
            elif new is not None and new.dtype.itemsize > buffer.dtype.itemsize and name in self._constants():
                exact = self.part.constant(name, self.scope)
                self._buffers[name] = exact.to(new) if exact.shape == new.shape else new  # a rank may hold a slice
        return self

    def _constants(self) -> set[str]:
        return {weight.name for weight in weights_of(self.part, self.scope) if weight.role == "const"}

    def modules_named(self, name: str) -> Any:
        """The child or list of children called `name`; None where the spec has none."""
        return self._modules.get(name)


def make(part: Part, scope: Scope) -> Module:
    """Return the part's module and all modules below it, on the meta device."""
    cls = part.module
    assert cls is not None, f"{part.kind} has no module"
    assert issubclass(cls, Module), f"{part.kind}: {cls.__name__} is not a dovetail.nn.module.Module"
    return cls(part, scope)


def holder(root: nn.Module, path: str) -> tuple[nn.Module, str]:
    """The module that holds the tensor at `path`, and the tensor's own name there."""
    owner, _, leaf = path.rpartition(".")
    return root.get_submodule(owner), leaf


def tensor_at(root: nn.Module, path: str) -> Tensor:
    """The parameter or constant at `path`; W as a dense tensor where a leaf stores it in another form."""
    module, leaf = holder(root, path)
    return module.dense() if isinstance(module, Linear) and leaf == "weight" else getattr(module, leaf)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The context in which a model is in evaluation mode."""
    if not model.training:
        yield
        return
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:  # parents first: `train` sets the children, too
            if module.training != training:
                module.train(training)
