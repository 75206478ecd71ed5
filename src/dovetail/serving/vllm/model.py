"""The model that vLLM runs: the modules of a spec, with vLLM's attention layers as their views.

    config.json -> spec -> modules (construction.py) -> the same forward pass as everywhere (model.py), with other views

vLLM passes the tokens of all sequences in one dimension, with the position of each. A spec that vLLM cannot serve is refused
here, with path and reason, before any weight is read. Weights are loaded strictly: a tensor that is missing, unknown or of
another shape is an error.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.construction import allocate, on_meta
from dovetail.core.ctx import Ctx
from dovetail.core.errors import FileError, InputError
from dovetail.core.fold import declared
from dovetail.core.layout import TokenLayout
from dovetail.core.module import tensor_at
from dovetail.core.part import join
from dovetail.port.own_config import spec_of
from dovetail.serving.can_serve import attending, require
from dovetail.serving.vllm.attention import EngineView, attention_layer, scoring_of


class DovetailForCausalLM(nn.Module):
    """A causal language model of any spec whose decode state is KV caches of softmax attention."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        settings = vllm_config.model_config
        self.spec = spec_of(settings.hf_config.to_dict())
        require(self.spec, "vllm", vllm_config.parallel_config.tensor_parallel_size)
        self.model = on_meta(self.spec, settings.dtype)
        allocate(self.model, self.spec, settings.dtype, torch.get_default_device())
        self.attention = nn.ModuleDict()  # in the module tree, since vLLM looks for its layers there
        self.views: list[dict[str, EngineView]] = [{} for _ in self.spec.layers]
        for one in attending(self.spec):
            scoring = scoring_of(self.model, one.path, _ctx(torch.zeros(0, dtype=torch.long)))
            layer = attention_layer(one, scoring, vllm_config, join(prefix, one.path))
            self.attention[one.path.replace(".", "_")] = layer
            self.views[one.scope.layer][one.path.rpartition(".")[2]] = EngineView(layer)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Return the embeddings (tokens, embed) of token ids (tokens,)."""
        return self.model.embed(input_ids, _ctx(torch.zeros_like(input_ids)))[0]

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Return the hidden states (tokens, embed) of token ids (tokens,) at positions (tokens,)."""
        if input_ids is None or intermediate_tensors is not None:
            raise InputError("the plugin takes token ids, on one pipeline stage: leave out prompt embeddings and stages")
        return self.model.hidden(input_ids, _ctx(positions, self.views))[0]

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Return the logits (tokens, vocab) of hidden states (tokens, embed)."""
        return self.model.head(hidden_states, _ctx(hidden_states.new_zeros(len(hidden_states), dtype=torch.long)))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Copy every stored weight of the spec from (path, tensor) pairs; return the names of the parameters that they fill."""
        missing = {d.path for d in declared(self.spec) if d.weight.stored}
        for path, tensor in weights:
            if path not in missing:
                raise FileError(f"{path}: is not a weight of this spec, or is given twice; export the model again")
            target = tensor_at(self.model, path)
            if target.shape != tensor.shape:
                raise FileError(f"{path}: is {list(tensor.shape)}; the spec says {list(target.shape)}")
            with torch.no_grad():
                target.copy_(tensor)
            missing.remove(path)
        if missing:
            more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
            raise FileError(f"{min(missing)}: is missing{more}; export the model again")
        return {name for name, _ in self.named_parameters()}


def _ctx(positions: Tensor, views: list[dict[str, EngineView]] | None = None) -> Ctx:
    """The ctx of tokens at positions (tokens,); which of them are of one sequence is known to vLLM's attention alone."""
    return Ctx(layout=TokenLayout(None, positions, None, torch.zeros_like(positions), rows=1), views=views)
