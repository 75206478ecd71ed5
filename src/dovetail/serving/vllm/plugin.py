"""Register our config and model with vLLM: the entry point `vllm.general_plugins`, which vLLM calls in each of its processes.

vLLM then opens a directory that `dovetail export --family dovetail` wrote. The class is registered by name, so that torch is
imported only where a model runs.
"""

from __future__ import annotations

from dovetail.base.errors import UsageError, install_command

CLASSES = "dovetail.serving.vllm.model"  # has a class of the name of each architecture


def register() -> None:
    """Register the config and the models; a second call changes nothing."""
    try:
        from vllm import ModelRegistry  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UsageError(f"the plugin runs inside vLLM: {install_command('vllm')}") from error
    from transformers import AutoConfig

    from dovetail.hf.own_config import ATTENTION, HYBRID
    from dovetail.serving.vllm.hf_config import DovetailConfig

    AutoConfig.register(DovetailConfig.model_type, DovetailConfig, exist_ok=True)
    for name in {ATTENTION, HYBRID} - set(ModelRegistry.get_supported_archs()):
        ModelRegistry.register_model(name, f"{CLASSES}:{name}")
