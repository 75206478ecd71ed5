"""Sides: implementations that can be run here and compared.

    model                  a model of ours in memory; in Python, as the next
    factory                a function that returns an nn.Module, which is called with token ids (batch, n)
    dir                    a model directory in our layout or Hugging Face's, run by us
    hf:dir                 a directory in Hugging Face layout, run by transformers (transformers_side.py)
    py:file.py:factory     an nn.Module that a function of the user's returns; called with token ids (batch, n)
    emit:file.py           a file written by `dovetail emit`
    dump:dir               activations that another engine recorded (dump.py, dump_check.py)
    engine:model           the same, recorded now: vllm:dir, mlx:dir, llamacpp:file.gguf, transformers:dir (engines.py)
    http://…               a server's completions with log-probs (server.py)

A side builds its module once per dtype. In a float64 run, operations that ask for float32 compute in float64 (float64.py).
"""

from __future__ import annotations

import copy
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.base.errors import FileError
from dovetail.base.limits import CONFIG_BYTES
from dovetail.disk.model_files import CONFIG_FILE
from dovetail.disk.untrusted import Directory
from dovetail.hf.load import Watch, load
from dovetail.model.construction import set_constants
from dovetail.model.model import Model, ModelModule
from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout
from dovetail.nn.module import at_least_fp32, tensor_at
from dovetail.proof.compare.decoding import NO_CACHE, Decoder, arguments_of, cached_decoder, decode_refusal
from dovetail.proof.compare.float64 import float32_islands_widened
from dovetail.proof.compare.match import MatchedModule, comparable, ours, places_by_name, routers
from dovetail.proof.compare.prompt import Prompt
from dovetail.proof.compare.record import ANSWER, Recording, answer_of, record
from dovetail.proof.compare.user_code import errors_named, factory_of, import_file
from dovetail.spec.fold import declared
from dovetail.state.pool import Pool


class Side(ABC):
    """An implementation whose activations can be recorded."""

    label: str
    spec: Model | None = None  # of the model it implements, where that is known
    dtype: torch.dtype  # of its weights
    config: Mapping[str, Any] = MappingProxyType({})  # in Hugging Face layout; empty where the side has none

    @abstractmethod
    def module(self, dtype: torch.dtype) -> nn.Module:
        """The module with its weights in this dtype."""

    @abstractmethod
    def forward(self, module: nn.Module, prompt: Prompt) -> Tensor:
        """The output of the module for a prompt."""

    @abstractmethod
    def decoder(self, module: nn.Module, prompt: Prompt) -> Decoder | str:
        """A function that decodes with a cache; a string says why the side cannot."""

    @abstractmethod
    def places(self, module: nn.Module, spec: Model) -> list[MatchedModule]:
        """The modules that compute the outputs of our modules of a spec."""

    def reference(self) -> ModelModule | None:
        """The model that this side should implement, as a module of ours in float64; None where no spec is known."""
        return None


Places = Callable[[nn.Module], Sequence[MatchedModule]]


@torch.no_grad()
def run(side: Side, prompt: Prompt, dtype: torch.dtype, places: Places, sizes: Mapping[str, int]) -> Recording:
    """Run a side on a prompt in a dtype and record every place; the output of the whole model comes last."""
    module = side.module(dtype).eval()
    with float32_islands_widened(dtype), record(module, places(module), sizes, (prompt.batch, prompt.n)) as recording:
        begin = time.monotonic()
        answer = side.forward(module, prompt)
        recording.seconds = time.monotonic() - begin
    recording.taps.pop(ANSWER, None)
    recording.put(ANSWER, answer.detach())
    return recording


def dtype_of(module: nn.Module) -> torch.dtype:
    """The dtype of most parameter values of a module."""
    counts: dict[torch.dtype, int] = {}
    for weight in module.parameters():
        counts[weight.dtype] = counts.get(weight.dtype, 0) + weight.numel()
    return max(counts, key=lambda dtype: counts[dtype]) if counts else torch.float32


class NativeSide(Side):
    """A model directory of either layout, run by us."""

    def __init__(self, directory: str | Path, *, watch: Watch | None = None) -> None:
        self.label, self.directory, self.watch = str(directory), directory, watch
        self.model: ModelModule = load(directory, watch=watch).eval()
        self.spec = self.model.part
        self.dtype = dtype_of(self.model)
        where = Directory(directory)
        self.config = where.json(CONFIG_FILE, CONFIG_BYTES) if where.has(CONFIG_FILE) else {}

    def module(self, dtype: torch.dtype) -> ModelModule:
        if dtype == self.dtype:
            return self.model
        return in_dtype(load(self.directory, watch=self.watch), dtype)

    def forward(self, module: nn.Module, prompt: Prompt) -> Tensor:
        assert isinstance(module, ModelModule)
        ctx = Ctx(layout=TokenLayout.whole(prompt.batch, prompt.inputs.shape[1], prompt.inputs.device), types=prompt.types)
        if prompt.source is not None:
            ctx.encoder_output, ctx.encoder_layout = encoded(module, prompt.source)
        return module(prompt.inputs, ctx)

    def decoder(self, module: nn.Module, prompt: Prompt) -> Decoder | str:
        assert isinstance(module, ModelModule)
        refusal = decode_refusal(module.part, prompt)
        if refusal is not None:
            return refusal
        rows, source = list(range(prompt.batch)), prompt.source
        source_length = 0 if source is None else source.shape[1]
        pool = Pool(module.part, prompt.batch, prompt.n, dtype=module.dtype, source=source_length)
        if source is not None:
            output, layout = encoded(module, source)
            ctx = Ctx(layout=layout, encoder_output=output, encoder_layout=layout)
            module.fill(ctx, pool.admit(rows, [output.shape[1]] * prompt.batch))

        def step(ids: Tensor) -> Tensor:
            frame = pool.step(rows, [ids.shape[1]] * prompt.batch)
            return module(ids, Ctx(layout=frame.layout, views=frame.views))

        return step

    def places(self, module: nn.Module, spec: Model) -> list[MatchedModule]:
        assert self.spec is not None
        paths = {**comparable(self.spec), **routers(self.spec)}
        return [our for our in ours(spec) if our.theirs in paths]

    def reference(self) -> ModelModule | None:
        return self.module(torch.float64)


class ModelSide(NativeSide):
    """A model of ours in memory."""

    def __init__(self, model: ModelModule, label: str = "model") -> None:
        self.label, self.model = label, model.eval()
        self.spec = model.part
        self.dtype = dtype_of(model)

    def module(self, dtype: torch.dtype) -> ModelModule:
        return self.model if dtype == self.dtype else in_dtype(copy.deepcopy(self.model), dtype)


def encoded(model: ModelModule, source: Tensor) -> tuple[Tensor, TokenLayout]:
    """The encoder output of whole rows, and its layout."""
    return model.encode(source, Ctx(layout=TokenLayout.whole(source.shape[0], source.shape[1], source.device)))


def in_dtype(model: ModelModule, dtype: torch.dtype) -> ModelModule:
    """Convert a model in place: weights to the dtype, constants computed again in at least float32."""
    for weight in model.parameters():
        weight.data = weight.data.to(dtype)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                module.register_buffer(name, buffer.to(at_least_fp32(dtype)), name not in module._non_persistent_buffers_set)
    set_constants(model, model.part, dtype, "cpu")
    return model.eval()


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

    def places(self, module: nn.Module, spec: Model) -> list[MatchedModule]:
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
