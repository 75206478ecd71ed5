"""Sides: whatever can be asked what it computes.

    dir                    a model directory, ours or in Hugging Face layout, run by us
    hf:dir                 a directory in Hugging Face layout, run by transformers
    py:file.py:factory     an nn.Module that a function of the user's returns; called with token ids (batch, n)
    emit:file.py           a file written by `dovetail emit`
    http://…               a server's completions with log-probs (served.py)

A local side is made anew for each dtype. Its float64 run is made wide: what it computes in float32 whatever its dtype, it
computes in float64 there (float64.py).
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dovetail.construction import set_constants
from dovetail.core.ctx import Ctx
from dovetail.core.errors import FileError, SpecError
from dovetail.core.fold import declared
from dovetail.core.layout import TokenLayout
from dovetail.core.module import at_least_fp32, tensor_at
from dovetail.io.untrusted import Directory
from dovetail.model import Model, ModelModule
from dovetail.port.dialect import DIALECTS
from dovetail.port.hf import form_of, from_hf
from dovetail.port.load import CONFIG_FILE, LARGEST_CONFIG, Watch, load, origin
from dovetail.verification.float64 import float32_islands_widened
from dovetail.verification.match import Place, comparable, found_in, ours, theirs, with_layers
from dovetail.verification.prompt import Prompt
from dovetail.verification.record import ANSWER, Recording, answer_of, listening

EMITTED = "emit:"
EXTRA = 'running a directory by transformers needs it: pip install "dovetail[hf]"'


class Local(Protocol):
    """A side whose activations can be seen."""

    label: str
    spec: Model | None  # what it computes, where that is known
    dtype: torch.dtype  # what its weights are in

    def made(self, dtype: torch.dtype) -> nn.Module:
        """The module with its weights in this dtype."""
        ...

    def ask(self, module: nn.Module, prompt: Prompt) -> Tensor:
        """The module's answer."""
        ...

    def places(self, module: nn.Module, spec: Model) -> list[Place]:
        """Where the outputs of our modules of a spec are to be found in it."""
        ...

    def known(self) -> ModelModule | None:
        """What it should compute, as a model of ours in float64; None where only its code knows."""
        ...


@torch.no_grad()
def run(
    side: Local,
    prompt: Prompt,
    dtype: torch.dtype,
    places: Callable[[nn.Module], Sequence[Place]],
    sizes: Mapping[str, int],
) -> Recording:
    """What a side computes for a prompt in a dtype, at every place; its answer comes last."""
    module = side.made(dtype).eval()
    with float32_islands_widened(dtype), listening(module, places(module), sizes, (prompt.batch, prompt.n)) as heard:
        answer = side.ask(module, prompt)
    heard.taps.pop(ANSWER, None)
    heard.put(ANSWER, answer.detach())
    return heard


def dtype_of(module: nn.Module) -> torch.dtype:
    """The dtype of most of a module's numbers."""
    counts: dict[torch.dtype, int] = {}
    for weight in module.parameters():
        counts[weight.dtype] = counts.get(weight.dtype, 0) + weight.numel()
    return max(counts, key=lambda dtype: counts[dtype]) if counts else torch.float32


# -- run by us ------------------------------------------------------------------------------------------------------


class Ours:
    """A model directory of either kind, run by us."""

    def __init__(self, directory: str | Path, *, watch: Watch | None = None) -> None:
        self.label, self.directory, self.watch = str(directory), directory, watch
        self.model: ModelModule = load(directory, watch=watch)
        self.spec: Model | None = self.model.part
        self.dtype = dtype_of(self.model)

    def made(self, dtype: torch.dtype) -> ModelModule:
        if dtype == self.dtype:
            return self.model
        return in_dtype(load(self.directory, watch=self.watch), dtype)

    def ask(self, module: nn.Module, prompt: Prompt) -> Tensor:
        assert isinstance(module, ModelModule)
        return answered(module, prompt)

    def places(self, module: nn.Module, spec: Model) -> list[Place]:
        assert self.spec is not None
        have = comparable(self.spec)
        return [place for place in ours(spec) if place.theirs in have]

    def known(self) -> ModelModule | None:
        return self.made(torch.float64)


def in_dtype(model: ModelModule, dtype: torch.dtype) -> ModelModule:
    """The model itself, its weights in a dtype and its constants as exact as goes with it."""
    for weight in model.parameters():
        weight.data = weight.data.to(dtype)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                module.register_buffer(name, buffer.to(at_least_fp32(dtype)), name not in module._non_persistent_buffers_set)
    set_constants(model, model.part, dtype, "cpu")
    return model


def answered(model: ModelModule, prompt: Prompt) -> Tensor:
    """Our model's answer to a prompt."""
    inputs, layout = prompt.inputs, TokenLayout.whole(prompt.batch, prompt.inputs.shape[1], prompt.inputs.device)
    ctx = Ctx(layout=layout, types=prompt.types)
    if prompt.source is not None:
        there = TokenLayout.whole(prompt.batch, prompt.source.shape[1], prompt.source.device)
        ctx.encoder_output, ctx.encoder_layout = model.encode(prompt.source, Ctx(layout=there))
    return model(inputs, ctx)


# -- run by transformers --------------------------------------------------------------------------------------------


class Theirs:
    """A directory in Hugging Face layout, run by transformers."""

    def __init__(self, directory: str | Path) -> None:
        self.label, self.directory = f"hf:{directory}", Path(directory)
        self.config = config_of(Directory(directory))
        self.spec = _spec_of(self.config)
        dialect = DIALECTS.get(self.config["model_type"]) if self.spec is not None else None
        self.form = None if dialect is None else form_of(self.config, dialect)
        self.library = transformers()
        self.dtype = dtype_of(self.loaded("auto"))

    def loaded(self, dtype: torch.dtype | str) -> nn.Module:
        """Their class with the directory's weights; every tensor must have found its place."""
        auto = getattr(self.library, "AutoModelForCausalLM" if self.form is None else self.form.auto)
        eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
        asked = {"dtype": dtype, "output_loading_info": True, "local_files_only": True, **eager}
        model, told = auto.from_pretrained(self.directory, **asked)
        for what in ("missing_keys", "mismatched_keys"):
            if told[what]:
                first = sorted(map(str, told[what]))[0]
                raise FileError(f"{self.directory}: transformers has {what.replace('_', ' ')}: {first}")
        return model.eval()

    def made(self, dtype: torch.dtype) -> nn.Module:
        with float32_islands_widened(dtype):
            return self.loaded(dtype)

    def ask(self, module: nn.Module, prompt: Prompt) -> Tensor:
        asked = {"pixel_values" if prompt.inputs.is_floating_point() else "input_ids": prompt.inputs}
        if prompt.source is not None:
            asked = {"input_ids": prompt.source, "decoder_input_ids": prompt.inputs}
        if prompt.types is not None:
            asked["token_type_ids"] = prompt.types
        out = module(**asked)
        return answer_of(out) if self.form is None else out[self.form.answer]

    def places(self, module: nn.Module, spec: Model) -> list[Place]:
        if self.spec is None:
            return found_in(module, spec, {})
        have = {name for name, _ in module.named_modules()}
        found = [place for place in theirs(self.spec, self.config["model_type"]) if place.theirs in have]
        return with_layers(found, module, self.spec)

    def known(self) -> ModelModule | None:
        return None if self.spec is None else in_dtype(load(self.directory), torch.float64)


def config_of(where: Directory) -> Mapping[str, Any]:
    """The config of a directory that transformers is to run; one that names code of its own is refused."""
    config = where.json(CONFIG_FILE, LARGEST_CONFIG)
    if config.get("auto_map"):
        raise FileError(f"{where.place}: auto_map names code to be run; nothing in a model directory is run here")
    return config


def transformers() -> Any:
    """The library, quiet; an error that names the extra where it is not installed."""
    try:
        import transformers
    except ImportError as missing:
        raise FileError(EXTRA) from missing
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    return transformers


def _spec_of(config: Mapping[str, Any]) -> Model | None:
    """What a config describes; None for a family that is not known here."""
    try:
        return from_hf(config)
    except SpecError:
        return None


# -- a user's module ------------------------------------------------------------------------------------------------


class Made:
    """A module that a function returns; called anew for each dtype, with the first one's weights."""

    spec: Model | None = None

    def __init__(self, label: str, factory: Callable[[], nn.Module], told: Mapping[str, str] | None = None) -> None:
        self.label, self.factory, self.told = label, factory, dict(told or {})
        self.first = factory()
        if not isinstance(self.first, nn.Module):
            raise FileError(f"{label}: gave {type(self.first).__name__}, not an nn.Module")
        self.dtype = dtype_of(self.first)

    def made(self, dtype: torch.dtype) -> nn.Module:
        if dtype == self.dtype:
            return self.first
        with float32_islands_widened(dtype):  # made anew: constants that no file holds are computed in the new dtype
            module = self.factory().to(dtype)
        module.load_state_dict(self.first.state_dict())
        return module

    def ask(self, module: nn.Module, prompt: Prompt) -> Tensor:
        given = (prompt.inputs,) if prompt.source is None else (prompt.source, prompt.inputs)
        return answer_of(module(*given))

    def places(self, module: nn.Module, spec: Model) -> list[Place]:
        return found_in(module, spec, self.told)

    def known(self) -> ModelModule | None:
        return None


def from_file(text: str, told: Mapping[str, str]) -> Made:
    """`file.py:factory`: the file is run, as the user asked by naming it."""
    usage = f"py:{text}: write py:file.py:factory, the factory being a function that returns an nn.Module"
    return Made(f"py:{text}", factory_of(text, usage), told)


def factory_of(text: str, usage: str) -> Callable[[], Any]:
    """The function that `file.py:factory` names; `usage` is said where the text is nothing of the kind."""
    name, _, function = text.rpartition(":")
    if not name or not function.isidentifier():
        raise FileError(usage)
    found = vars(imported(Path(name))).get(function)
    if not callable(found):
        raise FileError(f"{name}: has no function called {function}")
    return found


def imported(file: Path) -> Any:
    """A Python file as a module."""
    if not file.is_file():
        raise FileError(f"{file}: no such file")
    spec = importlib.util.spec_from_file_location(f"verified_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise FileError(f"{file}: is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their own module up
    spec.loader.exec_module(module)
    return module


def emitted(file: str, other: Local) -> Made:
    """A file that `dovetail emit` wrote, with the weights of the side it is compared with: their names are the same."""
    weights = other.known()
    if weights is None:
        raise FileError(f"emit:{file}: takes its weights from the other side, which must be a model directory")
    model = vars(imported(Path(file))).get("Model")
    if not isinstance(model, type) or not issubclass(model, nn.Module):
        raise FileError(f"{file}: holds no class Model; was it written by `dovetail emit`?")
    side = Made(f"emit:{file}", model)
    stored = {d.path: tensor_at(weights, d.path) for d in declared(weights.part) if d.weight.stored}  # tied ones once
    try:
        side.first.to(other.dtype).load_state_dict(stored)
    except RuntimeError as error:
        raise FileError(f"{file}: was written from another spec than {other.label} has ({str(error)[:300]})") from error
    side.dtype = other.dtype
    return side


def pair(a: str, b: str, told: Mapping[str, str] | None = None, *, watch: Watch | None = None) -> tuple[Local, Local]:
    """The two sides that two texts name."""
    if a.startswith(EMITTED) and b.startswith(EMITTED):
        raise FileError(f"{a}, {b}: two emitted files hold no weights; one side must be a model directory")
    if a.startswith(EMITTED):
        other = local(b, told, watch=watch)
        return emitted(a.removeprefix(EMITTED), other), other
    first = local(a, told, watch=watch)
    return first, emitted(b.removeprefix(EMITTED), first) if b.startswith(EMITTED) else local(b, told, watch=watch)


def local(text: str, told: Mapping[str, str] | None = None, *, watch: Watch | None = None) -> Local:
    """The side that a text names."""
    kind, colon, rest = text.partition(":")
    if colon and kind == "hf":
        return Theirs(rest)
    if colon and kind == "py":
        return from_file(rest, told or {})
    if not Path(text).is_dir():
        raise FileError(
            f"{text}: no such directory; a side is a directory, hf:DIR, py:FILE.py:FACTORY, emit:FILE.py or http://…"
        )
    origin(Directory(text))
    return Ours(text, watch=watch)
