"""vLLM's attention layer as the view of a mixer: it appends keys and values to vLLM's KV cache and attends to all of them.

    kv = view.append(layout, k, v)          z = kv.attend(layout, q, scoring)          k, v, q (tokens, heads, head)

The layer is constructed from what the part declares: KV heads, head size and window from its state and mask, scale, soft-cap,
slopes and sinks from its scoring. Which tokens belong to which sequence is known to vLLM alone, so the entries cannot be read
in another way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from dovetail.base.errors import StateError
from dovetail.nn.layout import TokenLayout
from dovetail.nn.softmax import SoftmaxModule
from dovetail.nn.view import Edit, Entries, Scoring
from dovetail.serving.can_serve import Attending

HIDDEN = "vLLM keeps the entries of its KV cache to itself; dovetail.can_serve refuses a spec that reads them"


def attention_layer(one: Attending, scoring: Scoring, cuts: Mapping[str, int], vllm_config: Any, prefix: str) -> nn.Module:
    """Construct vLLM's attention layer for a mixer and its scoring on this rank; `cuts` are the axes that ranks share, `prefix`
    names the layer in vLLM's cache."""
    from vllm.model_executor.layers.attention import Attention  # pyright: ignore[reportMissingImports]

    kv_heads, head = one.state.shape(one.scope, cuts)
    slopes = None if scoring.slopes is None else scoring.slopes.tolist()
    sinks = {} if scoring.sink is None else {"sinks": scoring.sink}  # the parameter itself: its values are loaded later
    return Attention(
        len(scoring.heads),
        head,
        scoring.scale,
        num_kv_heads=kv_heads,
        alibi_slopes=slopes,
        logits_soft_cap=scoring.softcap,
        per_layer_sliding_window=one.window,
        cache_config=vllm_config.cache_config,
        quant_config=vllm_config.quant_config,
        prefix=prefix,
        **sinks,
    )


class EngineView:
    """The KV cache of one mixer in vLLM."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def append(self, layout: TokenLayout, *entries: Tensor) -> EngineKV:
        """Return the keys and values (tokens, kv_heads, head) of this step; the layer stores them when it attends."""
        k, v = entries
        return EngineKV(self.layer, k, v)

    def stored(self) -> EngineKV:
        """Refuse."""
        raise StateError(HIDDEN)

    def append_blocks(self, layout: TokenLayout, *entries: Tensor) -> EngineKV:
        """Refuse."""
        raise StateError(HIDDEN)


class EngineKV:
    """The keys and values of this step, and all before them in vLLM's cache."""

    def __init__(self, layer: nn.Module, k: Tensor, v: Tensor) -> None:
        self.layer, self.k, self.v = layer, k, v

    def attend(self, layout: TokenLayout, q: Tensor, scoring: Scoring, edit: Edit | None = None) -> Tensor:
        """Attend with q (tokens, heads, head), by the scoring that the layer was constructed for."""
        if edit is not None:
            raise StateError("vLLM's attention does not show its probs; trace the model outside of vLLM")
        return self.layer(q.flatten(-2), self.k.flatten(-2), self.v.flatten(-2)).unflatten(-1, q.shape[-2:])

    def entries(self) -> Entries:
        """Refuse."""
        raise StateError(HIDDEN)


def scoring_of(model: nn.Module, path: str, ctx: Any) -> Scoring:
    """Return the scoring of the mixer at a path."""
    module = model.get_submodule(path)
    assert isinstance(module, SoftmaxModule)
    return module.scoring(ctx)
