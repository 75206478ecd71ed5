"""Open a foreign model by its name on the command line: `hf:DIR`, `py:file.py:factory` or `py:package.module:factory`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from dovetail.base.errors import FileError
from dovetail.proof.compare.transformers_side import CAREFUL, check_directory, transformers
from dovetail.proof.compare.user_code import factory_of
from dovetail.proof.foreign.model import Foreign


def opened(text: str, *, seed: int = 0, as_is: bool = False) -> Foreign:
    """Return the model that `hf:DIR` or `py:…:factory` names. Weights of a checkpoint are not perturbed."""
    kind, _, rest = text.partition(":")
    if kind == "hf":
        make, stored = _of_directory(rest)
        label = text if stored else f"{text} (the directory holds no weights: they are random)"
        return Foreign(make, label, seed=seed, move=not (stored or as_is))
    usage = f"{text}: write hf:DIR, py:file.py:factory or py:package.module:factory; a factory returns an nn.Module"
    if kind != "py":
        raise FileError(usage)
    return Foreign(factory_of(rest, usage), text, seed=seed, move=not as_is)


def _of_directory(place: str) -> tuple[Callable[[], nn.Module], bool]:
    """A factory for the model of a directory in Hugging Face layout, and whether the directory holds its weights."""
    checked, library = check_directory(place), transformers()
    auto = library.AutoModelForCausalLM

    def make() -> nn.Module:
        if not checked.weights:
            config = library.AutoConfig.from_pretrained(place, local_files_only=True, trust_remote_code=False)
            return auto.from_config(config, trust_remote_code=False)
        return auto.from_pretrained(place, dtype=torch.get_default_dtype(), **CAREFUL)

    return make, checked.weights
