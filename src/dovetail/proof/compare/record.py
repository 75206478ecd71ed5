"""Record the inputs and outputs of modules during one forward pass, in the order in which the modules are called.

    layers.3.mixer.o        the output of the module            layers.3.mixer.o.in      its input

An input that is the same tensor object as the output of another module is stored with that module's address as its alias: where
both implementations pass the tensor on, it is compared once.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from dovetail.proof.compare.match import MatchedModule, rows_of

ANSWER = "answer"  # the address of the output of the whole model


@dc.dataclass
class Recording:
    """Activations by address, in order; for some inputs the address of the output that they are."""

    taps: dict[str, Tensor] = dc.field(default_factory=dict)
    alias: dict[str, str] = dc.field(default_factory=dict)
    choices: dict[str, Tensor] = dc.field(default_factory=dict)  # (batch · n, k) experts per token, sorted, by router
    repeated: set[str] = dc.field(default_factory=set)  # modules that were called more than once
    seconds: float = 0.0  # of the forward pass

    def put(self, address: str, x: Tensor) -> None:
        """Store an activation. A second call of the same module is not stored."""
        if address in self.taps:
            self.repeated.add(address)
        else:
            self.taps[address] = x

    def drop_repeated(self) -> None:
        """Remove modules that were called more than once: their calls cannot be paired with the other side's."""
        for address in self.repeated:
            self.taps.pop(address)


def first_tensor(values: Iterable[Any]) -> Tensor | None:
    """The first floating-point tensor among arguments or results, tuples and mappings included."""
    for value in values:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value
        if isinstance(value, (tuple, list)) and (inner := first_tensor(value)) is not None:
            return inner
        if isinstance(value, Mapping) and (inner := first_tensor(value.values())) is not None:
            return inner
    return None


# tensors by id, with the address that gave them; keeping the tensor keeps its id from being reused
Sources = dict[int, tuple[Tensor, str]]


@contextmanager
def record(
    module: nn.Module, places: Sequence[MatchedModule], sizes: Mapping[str, int], shape: tuple[int, int]
) -> Iterator[Recording]:
    """Record every forward of the module at these places inside the context; shape is (batch, n)."""
    recording, handles = Recording(), []
    sources: Sources = {}
    modules = dict(module.named_modules())
    for place in places:
        if place.choices:
            handles.append(modules[place.theirs].register_forward_hook(_choice_hook(place, recording)))
            continue
        before, after = _input_hook(place, recording, sources, shape), _output_hook(place, recording, sources, sizes, shape)
        handles.append(modules[place.theirs].register_forward_pre_hook(before, with_kwargs=True))
        handles.append(modules[place.theirs].register_forward_hook(after, with_kwargs=True))
    try:
        yield recording
    finally:
        for handle in handles:
            handle.remove()
        recording.drop_repeated()


def _input_hook(place: MatchedModule, recording: Recording, sources: Sources, shape: tuple[int, int]) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        values = (*args, *kwargs.values())
        x = first_tensor(values)
        several = sum(isinstance(value, Tensor) and value.is_floating_point() for value in values) > 1
        if x is None or (several and not place.layer):  # a norm with a gate as a second input differs from ours
            return
        for path in place.ours:
            recording.put(f"{path}.in", rows_of(x.detach(), *shape).clone())  # a copy: some modules add to it in place
            if id(x) in sources:
                recording.alias[f"{path}.in"] = sources[id(x)][1]
        sources.setdefault(id(x), (x, f"{place.ours[0]}.in"))

    return hook


def _output_hook(
    place: MatchedModule, recording: Recording, sources: Sources, sizes: Mapping[str, int], shape: tuple[int, int]
) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        y = first_tensor((out,))
        if y is None:
            return
        if len(place.ours) == 1:
            if id(y) in sources:  # the module returns a tensor that it was given, as a layer returns its last branch
                recording.alias[place.ours[0]] = sources[id(y)][1]
            sources[id(y)] = (y, place.ours[0])
        rows = rows_of(y.detach(), *shape)
        outputs = place.outputs(rows, sizes) if place.move is not None and rows.dim() == 2 else [rows]
        if len(outputs) == len(place.ours):
            for path, output in zip(place.ours, outputs, strict=True):
                recording.put(path, output.clone())

    return hook


def _choice_hook(place: MatchedModule, recording: Recording) -> Callable[..., None]:
    """Record which experts a router chooses: the integers it returns, or else the largest of the logits it returns."""

    def hook(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        values = out if isinstance(out, (tuple, list)) else (out,)
        tensors = [value for value in values if isinstance(value, Tensor)]
        chosen = next((x for x in tensors if not x.is_floating_point() and x.shape[-1] == place.choices), None)
        if chosen is None and tensors and tensors[0].shape[-1] >= place.choices:
            chosen = tensors[0].topk(place.choices, -1).indices
        if chosen is not None:
            recording.choices[place.ours[0]] = chosen.detach().reshape(-1, place.choices).sort(-1).values

    return hook


def answer_of(out: Any) -> Tensor:
    """The logits, or else the first floating-point tensor, of a model's output."""
    if isinstance(out, Mapping) and isinstance(out.get("logits"), Tensor):
        return out["logits"]
    tensor = first_tensor((out,))
    if tensor is None:
        raise TypeError(f"the model returned {type(out).__name__} without a floating-point tensor")
    return tensor
