"""Opening a foreign model by its name on the command line: `hf:DIR` or `py:file.py:factory`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from dovetail.core.errors import FileError
from dovetail.io.untrusted import Directory
from dovetail.lawbook.foreign.model import Foreign
from dovetail.verification.sides import config_of, factory_of, transformers


def opened(text: str, *, seed: int = 0, as_is: bool = False) -> Foreign:
    """The model that `hf:DIR` or `py:file.py:factory` names. Weights of a checkpoint stay as they are."""
    kind, _, rest = text.partition(":")
    if kind == "hf":
        make, stored = _of_directory(rest)
        return Foreign(make, text, seed=seed, move=not (stored or as_is))
    usage = f"{text}: write hf:DIR or py:file.py:factory, the factory being a function that returns an nn.Module"
    if kind != "py":
        raise FileError(usage)
    return Foreign(factory_of(rest, usage), text, seed=seed, move=not as_is)


def _of_directory(place: str) -> tuple[Callable[[], nn.Module], bool]:
    """What makes the model of a directory in Hugging Face layout, and whether its weights lie there too."""
    where, library = Directory(place), transformers()
    config_of(where)
    stored = any(name.endswith(".safetensors") for name in where.names())
    auto = library.AutoModelForCausalLM

    def make() -> nn.Module:
        if not stored:
            return auto.from_config(library.AutoConfig.from_pretrained(place, local_files_only=True))
        return auto.from_pretrained(place, local_files_only=True, use_safetensors=True, dtype=torch.get_default_dtype())

    return make, stored
