"""A model directory that another engine opens by its config.json, with our own model_type and the spec inside.

    DIR/config.json          model_type, the spec, and the sizes that engines read from a config
    DIR/dovetail.yaml        the spec, as in every model directory
    DIR/model.safetensors    every stored weight under our path, dense
    DIR/…                    tokenizer, generation settings, chat template, license

Such a config can express every spec; an engine needs our plugin to run it (serving/vllm).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dovetail.base.errors import FileError
from dovetail.disk.model_files import CONFIG_FILE, KEPT_CONFIG
from dovetail.files.model_dir import LazyTensors, spec_and, write_directory
from dovetail.files.spec import from_mapping
from dovetail.model.model import Model
from dovetail.spec.fold import declared, position_limit, states

MODEL_TYPE, SPEC = "dovetail", "spec"
ATTENTION, HYBRID = "DovetailForCausalLM", "DovetailHybridForCausalLM"  # engines decide by the name which caches a model has
LENGTH = "max_position_embeddings"
DEFAULT_LENGTH = 4096  # tokens per sequence where neither a table of positions nor the imported config gives a limit
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def is_own(config: Mapping[str, Any]) -> bool:
    """Whether a config is one of ours."""
    return config.get("model_type") == MODEL_TYPE


def spec_of(config: Mapping[str, Any], shown: str | Path = CONFIG_FILE) -> Model:
    """Return the spec in a config of ours; `shown` is its file in errors."""
    data = config.get(SPEC)
    if not isinstance(data, Mapping):
        raise FileError(f"{shown}: has no mapping `{SPEC}`; write the directory with dovetail export --family {MODEL_TYPE}")
    return from_mapping(data)


def architecture(spec: Model) -> str:
    """Return the name of the class that runs a spec in an engine: some decode state is recurrent, or none."""
    recurrent = any(state.per == "sequence" and not scope.drafts for _, state, scope in states(spec))
    return HYBRID if recurrent else ATTENTION


def own_config(spec: Model, dtype: torch.dtype, kept: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a spec; `kept` is the config that the model was imported with, for token ids and the longest
    sequence."""
    return {
        "model_type": MODEL_TYPE,
        "architectures": [architecture(spec)],
        "dtype": str(dtype).removeprefix("torch."),
        "hidden_size": spec.width,
        "vocab_size": spec.vocab,
        "num_hidden_layers": len(spec.layers),
        **_heads(spec),
        LENGTH: position_limit(spec) or kept.get(LENGTH) or DEFAULT_LENGTH,
        "tie_word_embeddings": False,  # tied weights follow from the spec
        **{name: kept.get(name) for name in TOKEN_IDS},
        SPEC: spec.to_data(),
    }


def _heads(spec: Model) -> dict[str, int]:
    """Head counts and size of the first layer that has a KV cache; layers may differ, and the spec has all."""
    names = {"num_attention_heads": "heads", "num_key_value_heads": "kv_heads", "head_dim": "head"}
    for _, state, scope in states(spec):
        if all(axis in scope.sizes for axis in names.values()) and state.per == "token":
            return {name: scope.size(axis) for name, axis in names.items()}
    return {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": spec.width}


def write_own_config(
    spec: Model, weights: Sequence[LazyTensors], out: str | Path, carried: Mapping[str, bytes], kept: Mapping[str, Any]
) -> int:
    """Write a model with a config of ours, and return the number of its tensors. `weights` has one weight of the spec per
    piece; `carried` are the files beside the weights, `kept` is the config that the model was imported with."""
    by_path = {path: piece.layout[path] for piece in weights for path in piece.layout}
    parameters = [d.path for d in declared(spec) if d.weight.stored and not d.weight.buffer]
    dtype = functools.reduce(torch.promote_types, {by_path[path].dtype for path in parameters})
    config = json.dumps(own_config(spec, dtype, kept), indent=2) + "\n"
    beside = {name: data for name, data in carried.items() if name != KEPT_CONFIG}
    write_directory(out, weights, {**spec_and(spec, beside), CONFIG_FILE: config.encode()})
    return len(by_path)
