"""An nn.Module that a user's function returns, and a file written by `dovetail emit`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.core.errors import FileError
from dovetail.core.fold import declared
from dovetail.core.module import tensor_at
from dovetail.model import Model
from dovetail.proof.compare.decoding import NO_CACHE, Decoder, arguments_of, cached_decoder
from dovetail.proof.compare.float64 import float32_islands_widened
from dovetail.proof.compare.match import Place, places_by_name
from dovetail.proof.compare.prompt import Prompt
from dovetail.proof.compare.record import answer_of
from dovetail.proof.compare.sides import Side, dtype_of
from dovetail.proof.compare.user_code import errors_named, factory_of, import_file


class ModuleSide(Side):
    """A module that a factory returns: built once per dtype, with the weights of the first one."""

    def __init__(self, label: str, factory: Callable[[], nn.Module], user_map: Mapping[str, str] | None = None) -> None:
        self.label, self.factory, self.user_map = label, factory, dict(user_map or {})
        self.first = self._build()
        if not isinstance(self.first, nn.Module):
            raise FileError(f"{label}: gave {type(self.first).__name__}, not an nn.Module")
        self.dtype = dtype_of(self.first)

    def _build(self) -> nn.Module:
        with errors_named(self.label):
            return self.factory()

    def module(self, dtype: torch.dtype) -> nn.Module:
        if dtype == self.dtype:
            return self.first
        with float32_islands_widened(dtype):  # built again, so that constants that no file holds are computed in the new dtype
            module = self._build().to(dtype)
        with errors_named(self.label):
            module.load_state_dict(self.first.state_dict())
        return module

    def _call(self, module: nn.Module, *inputs: Tensor, **cache: Any) -> Any:
        with errors_named(self.label):
            return module(*inputs, **cache)

    def forward(self, module: nn.Module, prompt: Prompt) -> Tensor:
        inputs = (prompt.inputs,) if prompt.source is None else (prompt.source, prompt.inputs)
        with errors_named(self.label):
            return answer_of(self._call(module, *inputs))

    def decoder(self, module: nn.Module, prompt: Prompt) -> Decoder | str:
        if prompt.source is not None or prompt.inputs.is_floating_point():
            return NO_CACHE
        return cached_decoder(partial(self._call, module), arguments_of(module), prompt.inputs, answer_of)

    def places(self, module: nn.Module, spec: Model) -> list[Place]:
        return places_by_name(module, spec, self.user_map)


def from_file(text: str, user_map: Mapping[str, str]) -> ModuleSide:
    """The side that `file.py:factory` names; the file is executed, as the user asked by naming it."""
    usage = f"py:{text}: write py:file.py:factory, the factory being a function that returns an nn.Module"
    return ModuleSide(f"py:{text}", factory_of(text, usage), user_map)


def emitted(file: str, other: Side) -> ModuleSide:
    """A file written by `dovetail emit`, with the weights of the other side: their names are the same."""
    weights = other.reference()
    if weights is None:
        raise FileError(f"emit:{file}: takes its weights from the other side, which must be a model directory")
    model = vars(import_file(Path(file))).get("Model")
    if not isinstance(model, type) or not issubclass(model, nn.Module):
        raise FileError(f"{file}: has no class Model; give a file written by `dovetail emit`")
    side = ModuleSide(f"emit:{file}", model)
    stored = {d.path: tensor_at(weights, d.path) for d in declared(weights.part) if d.weight.stored}  # tied ones once
    try:
        side.first.to(other.dtype).load_state_dict(stored)
    except RuntimeError as error:
        raise FileError(f"{file}: was written from another spec than {other.label} has ({str(error)[:300]})") from error
    side.dtype = other.dtype
    return side
