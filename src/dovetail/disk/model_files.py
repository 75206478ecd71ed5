"""The files of a model directory, by name; any other file or sub-directory is foreign.

Replacing a model replaces its files, since a chat template or generation config of the old model would silently apply to the
new one. Foreign files belong to a person or to another tool, and are never deleted.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

SPEC_FILE = "dovetail.yaml"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"  # of Hugging Face's layout
KEPT_CONFIG = "imported_config.json"  # the config that a model was imported with
QUANTIZATION_FILE = "quantization.yaml"  # which weights are stored in fewer bits, and how
GENERATION_FILE = "generation_config.json"
TOKENIZER_FILE = "tokenizer.json"
TEMPLATE_FILE = "chat_template.jinja"
CLASSES_FILE = "class_names.json"  # the names of the classes of the head, in their order
LOSSES_FILE = "loss.jsonl"
RUN_FILE = "run.yaml"  # the settings of the training run
INITIAL_FILE = "initial.json"  # digests of the weights that a training run started with
PLOT_FILE = "loss.png"
REFERENCE_FILE = "reference.safetensors"  # log-probs of the initial weights on the rows that a run is tuned on
SAMPLES_FILE = "samples.jsonl"  # generated as the run went
ADAPTER_FILE = "adapter.yaml"  # of an adapter directory, and of a run that trained one
ADAPTER_WEIGHTS = "adapter.safetensors"
PEFT_CONFIG = "adapter_config.json"  # of peft's layout
PEFT_WEIGHTS = "adapter_model.safetensors"

# copied from one model directory to another with the weights
CARRIED = (
    GENERATION_FILE,
    TOKENIZER_FILE,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    TEMPLATE_FILE,
    CLASSES_FILE,
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "preprocessor_config.json",
    "LICENSE",
    "LICENSE.txt",
    "LICENSE.md",
)
SHARDS = "model-*-of-*.safetensors"
MODEL_FILES = (
    *(SPEC_FILE, WEIGHTS_FILE, INDEX_FILE, SHARDS, CONFIG_FILE, KEPT_CONFIG, QUANTIZATION_FILE),
    *(LOSSES_FILE, RUN_FILE, INITIAL_FILE, PLOT_FILE, SAMPLES_FILE, REFERENCE_FILE),
    *(ADAPTER_FILE, ADAPTER_WEIGHTS, PEFT_CONFIG, PEFT_WEIGHTS),
    *CARRIED,
)
LISTED = 3  # foreign files that a message names


def foreign(directory: Path, written: Iterable[str] = ()) -> list[str]:
    """Return the names of a directory that are not model files, a sub-directory with a slash at its end; `written`: names that
    the writer writes anew."""
    anew = frozenset(written)
    with os.scandir(directory) as entries:
        found = {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries}
    return [f"{name}/" if is_dir else name for name, is_dir in sorted(found.items()) if is_dir or not _known(name, anew)]


def _known(name: str, anew: frozenset[str]) -> bool:
    return name in anew or any(fnmatchcase(name, pattern) for pattern in MODEL_FILES)


def listed(names: list[str]) -> str:
    """Return the first few names, and how many more there are."""
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more
