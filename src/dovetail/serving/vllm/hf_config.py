"""The config class of our model_type for transformers, by which vLLM reads config.json. Its fields: hf/own_config.py."""

from __future__ import annotations

from transformers import PretrainedConfig


class DovetailConfig(PretrainedConfig):
    """A config with the spec inside, as plain data."""

    model_type = "dovetail"
