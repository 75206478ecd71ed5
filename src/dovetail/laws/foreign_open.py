"""Opening a foreign model by its name on the command line: `hf:DIR` or `py:file.py:factory`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from dovetail.core.errors import FileError
from dovetail.directory import Directory
from dovetail.laws.foreign import Foreign
from dovetail.port.load import CONFIG_FILE, LARGEST_CONFIG
from dovetail.verify.sides import imported, transformers


def opened(text: str, *, seed: int = 0, as_is: bool = False) -> Foreign:
    """The model that `hf:DIR` or `py:file.py:factory` names. Weights of a checkpoint stay as they are."""
    kind, _, rest = text.partition(":")
    if kind == "hf":
        make, stored = _of_directory(rest)
        return Foreign(make, text, seed=seed, move=not (stored or as_is))
    name, _, function = rest.rpartition(":")
    if kind != "py" or not name or not function.isidentifier():
        raise FileError(f"{text}: write hf:DIR or py:file.py:factory, the factory being a function that returns an nn.Module")
    factory = vars(imported(Path(name))).get(function)
    if not callable(factory):
        raise FileError(f"{name}: has no function called {function}")
    return Foreign(factory, text, seed=seed, move=not as_is)


def _of_directory(place: str) -> tuple[Callable[[], nn.Module], bool]:
    """What makes the model of a directory in Hugging Face layout, and whether its weights lie there too."""
    where, library = Directory(place), transformers()
    config = where.json(CONFIG_FILE, LARGEST_CONFIG)
    if config.get("auto_map"):
        raise FileError(f"{place}: auto_map names code to be run; nothing in a model directory is run here")
    stored = any(name.endswith(".safetensors") for name in where.names())
    auto = library.AutoModelForCausalLM

    def make() -> nn.Module:
        if not stored:
            return auto.from_config(library.AutoConfig.from_pretrained(place, local_files_only=True))
        return auto.from_pretrained(place, local_files_only=True, use_safetensors=True, dtype=torch.get_default_dtype())

    return make, stored
