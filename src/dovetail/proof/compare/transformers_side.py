"""A directory in Hugging Face layout, run by transformers.

transformers opens files by its own rules, so the directory is checked before it is handed over: regular files, no link out of
the directory, weights in safetensors only, no code named in the config, no adapter that names another model.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dovetail.base.errors import FileError, SpecError, install_command
from dovetail.base.limits import CONFIG_BYTES
from dovetail.disk.model_files import CONFIG_FILE
from dovetail.disk.untrusted import Directory, refuse_pickles
from dovetail.hf.dialect import DIALECTS
from dovetail.hf.hf import form_of, from_hf
from dovetail.hf.load import load
from dovetail.model.model import Model, ModelModule
from dovetail.proof.compare.decoding import Decoder, arguments_of, cached_decoder, decode_refusal
from dovetail.proof.compare.float64 import float32_islands_widened
from dovetail.proof.compare.match import MatchedModule, places_by_name, theirs, with_layers, with_routers
from dovetail.proof.compare.prompt import Prompt
from dovetail.proof.compare.record import answer_of
from dovetail.proof.compare.sides import Side, dtype_of, in_dtype

EXTRA = f"running a directory with transformers needs it: {install_command('hf')}"
WEIGHTS, INDEX = ".safetensors", "model.safetensors.index.json"
OTHER_MODEL = "adapter_config.json"  # transformers follows it to the model that it names
READ = ("generation_config.json",)  # other JSON files that transformers reads
# what transformers may do with a directory that was checked
CAREFUL: Mapping[str, Any] = {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True}


class Checked(NamedTuple):
    """A directory that may be handed to transformers."""

    config: Mapping[str, Any]
    weights: bool  # False: the directory holds no weights, and a model made from it is randomly initialized


def check_directory(place: str | Path) -> Checked:
    """Check a directory before transformers opens it; an error names the file and the reason."""
    where = Directory(place)
    names = where.names()
    for name in names:
        real = where.path(name)
        if not real.is_file() and not real.is_dir():
            raise FileError(f"{where.place / name}: is not a regular file; remove it")
    if OTHER_MODEL in names:
        raise FileError(f"{where.place / OTHER_MODEL}: names another model to load; merge the adapter into the weights first")
    config = where.json(CONFIG_FILE, CONFIG_BYTES)
    for path, value in _items(config):
        if path.rpartition(".")[2] == "auto_map" and value:
            raise FileError(f"{where.place}: {path} in config.json names code; no code in a model directory is executed")
        if path.endswith("attn_implementation") and "/" in str(value):
            raise FileError(f"{where.place}: {path} in config.json names a kernel to download ({value}); remove it")
    for name in READ:
        if name in names:
            where.json(name)
    weights = any(name.endswith(WEIGHTS) for name in names)
    if not weights:
        refuse_pickles(where)
    if INDEX in names:
        for shard in dict(where.json(INDEX).get("weight_map") or {}).values():
            if not str(shard).endswith(WEIGHTS):
                raise FileError(f"{where.place / INDEX}: names {str(shard)!r}, which is not a {WEIGHTS} file")
            where.path(str(shard))
    return Checked(config, weights)


def _items(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value) of every entry of a config, nested ones included."""
    for name, value in config.items():
        yield f"{path}{name}", value
        if isinstance(value, Mapping):
            yield from _items(value, f"{path}{name}.")


def transformers() -> Any:
    """Import transformers and silence it; an error names the extra where it is not installed."""
    try:
        import transformers
    except ImportError as missing:
        raise FileError(EXTRA) from missing
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    return transformers


class TransformersSide(Side):
    """A directory in Hugging Face layout, run by transformers."""

    def __init__(self, directory: str | Path) -> None:
        self.label, self.directory = f"hf:{directory}", Path(directory)
        checked = check_directory(directory)
        if not checked.weights:
            raise FileError(f"{directory}: holds no {WEIGHTS} file; random weights cannot be verified")
        self.config = checked.config
        self.spec = _spec_of(self.config)
        dialect = DIALECTS.get(self.config["model_type"]) if self.spec is not None else None
        self.form = None if dialect is None else form_of(self.config, dialect)
        self.library = transformers()
        self.dtype = dtype_of(self.load_module("auto"))

    def load_module(self, dtype: torch.dtype | str) -> nn.Module:
        """Their class with the directory's weights; an error where a tensor is missing or has another shape."""
        auto = getattr(self.library, "AutoModelForCausalLM" if self.form is None else self.form.auto)
        eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
        model, info = auto.from_pretrained(self.directory, dtype=dtype, output_loading_info=True, **CAREFUL, **eager)
        for key in ("missing_keys", "mismatched_keys"):
            if info[key]:
                first = sorted(map(str, info[key]))[0]
                raise FileError(f"{self.directory}: transformers reports {key.replace('_', ' ')}: {first}")
        return model.eval()

    def module(self, dtype: torch.dtype) -> nn.Module:
        with float32_islands_widened(dtype):
            return self.load_module(dtype)

    def forward(self, module: nn.Module, prompt: Prompt) -> Tensor:
        inputs = {"pixel_values" if prompt.inputs.is_floating_point() else "input_ids": prompt.inputs}
        if prompt.source is not None:
            inputs = {"input_ids": prompt.source, "decoder_input_ids": prompt.inputs}
        if prompt.types is not None:
            inputs["token_type_ids"] = prompt.types
        return self._answer(module(**inputs))

    def _answer(self, out: Any) -> Tensor:
        return answer_of(out) if self.form is None else out[self.form.answer]

    def decoder(self, module: Any, prompt: Prompt) -> Decoder | str:
        refusal = None if self.spec is None else decode_refusal(self.spec, prompt)
        if refusal is not None:
            return refusal
        name, extra = "input_ids", {}
        if prompt.source is not None:
            name, extra = "decoder_input_ids", {"encoder_outputs": module.get_encoder()(input_ids=prompt.source)}

        def call(ids: Tensor, **cache: Any) -> Any:
            return module(**{name: ids}, **extra, **cache)

        return cached_decoder(call, arguments_of(module), prompt.inputs, self._answer)

    def places(self, module: nn.Module, spec: Model) -> list[MatchedModule]:
        if self.spec is None:
            return places_by_name(module, spec, {})
        places = with_routers(theirs(self.spec, self.config["model_type"]), module, self.spec)
        return with_layers(places, module, self.spec)

    def reference(self) -> ModelModule | None:
        return None if self.spec is None else in_dtype(load(self.directory), torch.float64)


def _spec_of(config: Mapping[str, Any]) -> Model | None:
    """The spec of a config, without multi-token prediction, which transformers does not run; None for an unknown family."""
    try:
        return dc.replace(from_hf(config), mtp=())
    except SpecError:
        return None
