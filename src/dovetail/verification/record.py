"""Record: what flows into and out of the modules of one forward pass, in the order in which they are called.

    layers.3.mixer.o        what the module gives            layers.3.mixer.o.in      what it is given

An input that is the very tensor another module gave is remembered as that one's alias: two implementations that hand it on
alike need not be compared twice.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from dovetail.verification.match import Place, rows_of

ANSWER = "answer"  # what the whole model gives


@dc.dataclass
class Recording:
    """Activations by address, in order; for some inputs the address of the tensor that they are."""

    taps: dict[str, Tensor] = dc.field(default_factory=dict)
    alias: dict[str, str] = dc.field(default_factory=dict)
    several: set[str] = dc.field(default_factory=set)  # modules that were called more than once

    def put(self, address: str, x: Tensor) -> None:
        """Remember an activation; of a module called again, nothing."""
        if address in self.taps:
            self.several.add(address)
        else:
            self.taps[address] = x

    def settled(self) -> Recording:
        """Without what was called several times: which call is which is not known."""
        for address in self.several:
            self.taps.pop(address)
        return self


def first_tensor(values: Iterable[Any]) -> Tensor | None:
    """The first floating-point tensor among arguments or results, looked for in tuples too."""
    for value in values:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value
        if isinstance(value, (tuple, list)) and (inner := first_tensor(value)) is not None:
            return inner
        if isinstance(value, Mapping) and (inner := first_tensor(value.values())) is not None:
            return inner
    return None


Given = dict[int, tuple[Tensor, str]]  # what modules gave, by identity; kept, so that no other tensor takes its place


@contextmanager
def listening(
    module: nn.Module, places: Sequence[Place], sizes: Mapping[str, int], shape: tuple[int, int]
) -> Iterator[Recording]:
    """While this lasts, every forward of the module is recorded at these places; shape is (batch, n)."""
    heard, handles = Recording(), []
    given: Given = {}
    known = dict(module.named_modules())
    for place in places:
        handles.append(known[place.theirs].register_forward_pre_hook(_before(place, heard, given, shape), with_kwargs=True))
        handles.append(known[place.theirs].register_forward_hook(_after(place, heard, given, sizes, shape), with_kwargs=True))
    try:
        yield heard
    finally:
        for handle in handles:
            handle.remove()
        heard.settled()


def _before(place: Place, heard: Recording, given: Given, shape: tuple[int, int]) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        values = (*args, *kwargs.values())
        x = first_tensor(values)
        several = sum(isinstance(value, Tensor) and value.is_floating_point() for value in values) > 1
        if x is None or (several and not place.layer):  # a norm that is given a gate too takes another input than ours
            return
        for path in place.ours:
            heard.put(f"{path}.in", rows_of(x.detach(), *shape).clone())  # some add to it in its place, later
            if id(x) in given:
                heard.alias[f"{path}.in"] = given[id(x)][1]
        given.setdefault(id(x), (x, f"{place.ours[0]}.in"))

    return hook


def _after(
    place: Place, heard: Recording, given: Given, sizes: Mapping[str, int], shape: tuple[int, int]
) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        y = first_tensor((out,))
        if y is None:
            return
        if len(place.ours) == 1:
            if id(y) in given:  # a module that hands on what it was given: a layer and its last part
                heard.alias[place.ours[0]] = given[id(y)][1]
            given[id(y)] = (y, place.ours[0])
        rows = rows_of(y.detach(), *shape)
        pieces = place.outputs(rows, sizes) if place.move is not None and rows.dim() == 2 else [rows]
        if len(pieces) == len(place.ours):
            for path, piece in zip(place.ours, pieces, strict=True):
                heard.put(path, piece.clone())

    return hook


def answer_of(out: Any) -> Tensor:
    """The logits (or whatever else is the first tensor) of what a model gives."""
    if isinstance(out, Mapping) and isinstance(out.get("logits"), Tensor):
        return out["logits"]
    found = first_tensor((out,))
    if found is None:
        raise TypeError(f"the model gave {type(out).__name__}, in which no floating-point tensor was found")
    return found
