"""The models that vLLM runs: the modules of a spec, with vLLM's attention and state layers as their views.

    config.json -> spec -> modules (model/construction.py) -> the forward pass of model/model.py, with other views

vLLM passes the tokens of all sequences in one dimension, with the position of each. Which caches a model has, vLLM reads from
its class, so that there are two: KV caches alone, and recurrent states with or without KV caches. A spec that vLLM cannot serve
is refused here, with path and reason, before any weight is read. Weights are loaded strictly: a tensor that is missing, unknown
or of another shape is an error.

The modules of a spec on one of vLLM's tensor-parallel ranks: built on the meta device, sharded there, then allocated.

    k.weight (kv_heads·head, embed)  ->  rows of this rank's KV heads          how each tensor is sharded: parallel/placement.py

A rank allocates its own shard alone, and copies its slice of each stored tensor. Heads, KV heads, slopes, sinks and recurrent
states are then those of the rank. Sums over ranks are taken in vLLM's process group.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dovetail.base.errors import FileError, InputError, UsageError
from dovetail.hf.own_config import architecture, spec_of
from dovetail.model.construction import on_meta, set_constants
from dovetail.model.model import Model
from dovetail.model.transformer import Transformer
from dovetail.nn.ctx import Ctx
from dovetail.nn.declared_tensors import held
from dovetail.nn.layout import TokenLayout
from dovetail.nn.module import tensor_at
from dovetail.nn.ranks import Ranks
from dovetail.parallel.construction import allocate, local
from dovetail.parallel.placement import local_slices
from dovetail.parallel.shard import TensorRanks, tensor_parallel
from dovetail.serving.can_serve import attending, cut_axes, recurring, require, whole_axes
from dovetail.serving.vllm.attention import EngineView, attention_layer, scoring_of
from dovetail.serving.vllm.recurrent import EngineState, StateBlocks, placed_states, rows_layout, state_layer
from dovetail.spec.fold import declared
from dovetail.spec.part import join

Views = list[dict[str, EngineView | EngineState]]


class DovetailForCausalLM(nn.Module):
    """A causal language model whose decode state is KV caches of softmax attention."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        settings = vllm_config.model_config
        self.spec = spec_of(settings.hf_config.to_dict())
        if (needed := architecture(self.spec)) != type(self).__name__:
            raise FileError(f"config.json: the architecture is {type(self).__name__}; the spec needs {needed}: export it again")
        tp = vllm_config.parallel_config.tensor_parallel_size
        require(self.spec, "vllm", tp)
        self.shard = build_shard(self.spec, settings.dtype, torch.get_default_device(), tp)
        self.model = self.shard.model
        self.attention = nn.ModuleDict()  # in the module tree, since vLLM looks for its layers there
        self.views: Views = [{} for _ in self.spec.layers]
        for one in attending(self.spec):
            with self.shard.run():
                scoring = scoring_of(self.model, one.path, self.ctx(torch.zeros(0, dtype=torch.long)))
            layer = attention_layer(one, scoring, self.shard.cuts, vllm_config, join(prefix, one.path))
            self.attention[one.path.replace(".", "_")] = layer
            self.views[one.scope.layer][one.path.rpartition(".")[2]] = EngineView(layer)
        self.recurrent = nn.ModuleDict()
        for one in recurring(self.spec):
            blocks = state_layer(*placed_states(one, settings.dtype, self.shard.cuts), vllm_config, join(prefix, one.path))
            self.recurrent[one.path.replace(".", "_")] = blocks
            self.views[one.scope.layer][one.path.rpartition(".")[2]] = EngineState(blocks)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Return the embeddings (tokens, embed) of token ids (tokens,)."""
        with self.shard.run():
            return self.model.embed(input_ids, self.ctx(torch.zeros_like(input_ids)))[0]

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
        ctx = self.ctx(positions)
        for blocks in self.recurrent.values():  # else vLLM's attention alone knows which tokens are of one sequence
            assert isinstance(blocks, StateBlocks)
            ctx.layout = rows_layout(blocks, positions)
            break
        ctx.views = self.views
        return self.model.hidden(input_ids, ctx)[0]

    def ctx(self, positions: Tensor) -> Ctx:
        """Return the ctx of tokens at positions (tokens,) on this rank, without caches."""
        layout = TokenLayout(None, positions, None, torch.zeros_like(positions), rows=1)
        return Ctx(layout=layout, ranks=Ranks(self.shard.ranks))

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Return the logits (tokens, vocab) of hidden states (tokens, embed)."""
        with self.shard.run():
            return self.model.head(hidden_states, self.ctx(hidden_states.new_zeros(len(hidden_states), dtype=torch.long)))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Copy every stored weight of the spec from (path, tensor) pairs; return the names of the parameters that they fill."""
        missing = {d.path: d.weight.shape(d.scope) for d in declared(self.spec) if d.weight.stored}
        for path, tensor in weights:
            if path not in missing:
                raise FileError(f"{path}: is not a weight of this spec, or is given twice; export the model again")
            if (shape := missing.pop(path)) != tensor.shape:
                raise FileError(f"{path}: is {list(tensor.shape)}; the spec says {list(shape)}")
            with torch.no_grad():
                local(tensor_at(self.model, path)).copy_(tensor[self.shard.slices[path]])
        if missing:
            more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
            raise FileError(f"{min(missing)}: is missing{more}; export the model again")
        return {name for name, _ in self.named_parameters()}


class DovetailHybridForCausalLM(DovetailForCausalLM):
    """A causal language model with recurrent states, with or without KV caches."""

    is_hybrid, has_inner_state = True, True

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        if vllm_config.num_speculative_tokens:
            raise UsageError("speculative decoding: the plugin cannot roll a recurrent state back; leave it out")
        super().__init__(vllm_config=vllm_config, prefix=prefix)

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: Any) -> tuple[tuple[int, ...], ...]:
        """Return the shape of the largest block, by which vLLM chooses the tokens per block of KV caches."""
        settings = vllm_config.model_config
        spec = spec_of(settings.hf_config.to_dict())
        cuts = cut_axes(spec, vllm_config.parallel_config.tensor_parallel_size)
        return ((max(placed_states(one, settings.dtype, cuts)[1] for one in recurring(spec)),),)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: Any) -> tuple[torch.dtype, ...]:
        """Return its dtype: bytes."""
        return (torch.uint8,)

    @classmethod
    def get_mamba_state_copy_funcs(cls, mamba_types: Iterable[Any]) -> dict[Any, tuple[Any, ...]]:
        """Return how vLLM copies a state from block to block: as a whole."""
        from vllm.model_executor.layers.mamba.mamba_utils import (  # pyright: ignore[reportMissingImports]
            get_temporal_copy_spec,
        )

        return dict.fromkeys(mamba_types, (get_temporal_copy_spec,))


class Shard(NamedTuple):
    """The modules on one rank, and by path the slice that it holds of every declared tensor."""

    model: Transformer
    slices: dict[str, tuple[slice, ...]]
    ranks: TensorRanks | None  # None: there is one

    @property
    def cuts(self) -> dict[str, int]:
        """The axes that are sharded, and into how many shards."""
        return {} if self.ranks is None else self.ranks.cuts

    def run(self) -> AbstractContextManager[None]:
        """Within this context modules read the weights of this rank."""
        return nullcontext() if self.ranks is None else self.ranks.run()


def build_shard(spec: Model, dtype: torch.dtype, device: torch.device, tp: int) -> Shard:
    """Build the modules of a spec on this rank of `tp`, without values of the weights."""
    model, ranks = on_meta(spec, dtype), None
    if tp > 1:
        from vllm.distributed.parallel_state import get_tp_group  # pyright: ignore[reportMissingImports]

        mesh = DeviceMesh.from_group(get_tp_group().device_group, device.type)
        ranks = tensor_parallel(model, spec, mesh, whole_axes(spec, tp))
    stored, rank = ({}, (0, 1)) if ranks is None else (ranks.stored, (ranks.rank, ranks.count))
    slices = {d.path: local_slices(d.weight.shape(d.scope), stored.get(d.path), rank) for d in held(model, spec)}
    allocate(model, spec, device)
    set_constants(model, spec, dtype, device, slices)
    return Shard(model, slices, ranks)
