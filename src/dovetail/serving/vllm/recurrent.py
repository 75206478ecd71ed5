"""vLLM's state layer as the view of a recurrent mixer: a fixed-size state per sequence, in the blocks of vLLM's cache.

    x, state = view.read(x)          y = view.write(y, *state)          state (rows, *axes) each, as the part declares

A block holds every state of one mixer, one behind the other, as bytes: MambaSpec(shapes=((bytes,),), dtypes=(uint8,)). So all
mixers have one kind of state for vLLM, whatever they declare, and one kind of copy: a block as a whole, which is how vLLM's
prefix cache keeps the state at the end of a block. A row is a request of this step; vLLM gives its block and its number of
tokens. Blocks are not cleared: a request that begins reads zeros instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dovetail.nn.layout import TokenLayout
from dovetail.nn.module import stored_dtype
from dovetail.serving.can_serve import Recurring

ALIGNED = 16  # bytes: where a state begins in a block


class PlacedState(NamedTuple):
    """One state in a block: its first byte, its number of bytes, its dtype and its shape."""

    first: int
    size: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def placed_states(one: Recurring, dtype: torch.dtype, cuts: Mapping[str, int]) -> tuple[list[PlacedState], int]:
    """Return the states of a mixer in a block, and the bytes of the block; `cuts` are the axes that ranks share."""
    placed, end = list[PlacedState](), 0
    for state in one.states:
        kind, shape = stored_dtype(state, dtype), state.shape(one.scope, cuts)
        for _ in range(state.copies):
            placed.append(PlacedState(end, prod(shape) * kind.itemsize, kind, shape))
            end += -(-placed[-1].size // ALIGNED) * ALIGNED
    return placed, end


class StateBlocks(nn.Module):
    """The states of one mixer, in vLLM's blocks."""

    def __init__(self, placed: Sequence[PlacedState], size: int, prefix: str) -> None:
        super().__init__()
        self.placed, self.size, self.prefix = placed, size, prefix
        self.kv_cache: tuple[Tensor, ...] = ()  # (blocks, bytes), which vLLM copies
        self.stores: list[Tensor] = []  # (blocks, *axes) each, views of it

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        """Return the shape of what vLLM stores per block."""
        return ((self.size,),)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        """Return its dtype."""
        return (torch.uint8,)

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """Take the pages (blocks, 1, 1, bytes) that vLLM allocated; a page may be longer than a block."""
        pages = kv_cache.squeeze(dim=(1, 2)).view(torch.uint8)
        self.kv_cache = (pages[:, : self.size],)
        self.stores = [
            pages[:, one.first : one.first + one.size].view(one.dtype).unflatten(-1, one.shape) for one in self.placed
        ]


def state_layer(placed: Sequence[PlacedState], size: int, vllm_config: Any, prefix: str) -> StateBlocks:
    """Construct vLLM's state layer for the states of a mixer; `prefix` names the layer in vLLM's cache."""
    from vllm.model_executor.layers.mamba.abstract import MambaBase  # pyright: ignore[reportMissingImports]
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum  # pyright: ignore[reportMissingImports]

    class StateLayer(StateBlocks, MambaBase):
        mamba_type = MambaAttentionBackendEnum.LINEAR  # whose metadata are the block and the tokens of each request, no more

    layer = StateLayer(placed, size, prefix)
    vllm_config.compilation_config.static_forward_context[prefix] = layer
    return layer


def metadata_of(layer: StateBlocks) -> Any:
    """Return what vLLM knows of this step's requests: query_start_loc (requests + 1,), seq_lens and state_indices_tensor
    (requests,); None in a run that only measures memory."""
    from vllm.forward_context import get_forward_context  # pyright: ignore[reportMissingImports]

    by_layer = get_forward_context().attn_metadata
    return None if by_layer is None else by_layer.get(layer.prefix)


def rows_layout(layer: StateBlocks, positions: Tensor) -> TokenLayout:
    """Return the layout of tokens at positions (tokens,), with the request of each as its row; tokens behind the last request
    are padding."""
    metadata = metadata_of(layer)
    if metadata is None:
        return TokenLayout(None, positions, None, torch.zeros_like(positions), rows=1)
    starts = metadata.query_start_loc.to(positions.dtype)
    place, rows = torch.arange(len(positions), device=positions.device), len(starts) - 1
    row = torch.bucketize(place, starts[1:], right=True)
    return TokenLayout.of(positions, torch.where(row < rows, 0, -1), row.clamp_max(rows - 1), rows=rows)


class EngineState:
    """The recurrent state of one mixer in vLLM."""

    def __init__(self, layer: StateBlocks) -> None:
        self.layer = layer

    def read(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """Return x and the state (rows, *axes) of each request; zeros for one that begins, whatever its block held before."""
        metadata = metadata_of(self.layer)
        if metadata is None:
            return x, None
        begins = metadata.seq_lens == metadata.query_start_loc.diff()
        found = (store[metadata.state_indices_tensor] for store in self.layer.stores)
        return x, tuple(torch.where(begins.view(-1, *[1] * (one.dim() - 1)), 0, one) for one in found)

    def write(self, y: Tensor, *new: Tensor) -> Tensor:
        """Store the state (rows, *axes) of each request; return y."""
        metadata = metadata_of(self.layer)
        if metadata is not None:
            for store, values in zip(self.layer.stores, new, strict=True):
                store[metadata.state_indices_tensor] = values.to(store.dtype)
        return y
