"""GPT-BigCode (SantaCoder, StarCoder): GPT-2 with one KV head, or as many as heads, and q, k, v packed (Allal et al. 2023)."""

from __future__ import annotations

from typing import Any

from dovetail.base.errors import SpecError
from dovetail.hf.dialect.gpt2 import GPT2, QKV
from dovetail.hf.field import ACTIVATIONS, Choice, Config, Field, Implied, Settings, value_at
from dovetail.hf.table import Row, rows
from dovetail.model.model import Model

KV_HEADS = "layers.*.mixer.kv_heads"


class MultiQuery(Field):
    """One KV head, or as many as there are query heads."""

    names = ("multi_query",)

    def to_hf(self, spec: Model) -> dict[str, Any]:
        groups, heads = value_at(spec, KV_HEADS), value_at(spec, "layers.*.mixer.heads")
        return {"multi_query": groups == 1} if groups in (1, heads) else {}

    def from_hf(self, config: Config) -> Settings:
        single = config.get("multi_query", True)
        if not isinstance(single, bool):
            raise SpecError("config.multi_query", f"{single!r} is not true or false")
        return {KV_HEADS: 1 if single else None}


def _kv_heads(config: Config) -> Any:
    return 1 if config.get("multi_query", True) else config.get("n_head")


GPT_BIGCODE = GPT2.variant(
    "gpt_bigcode",
    architecture="GPTBigCodeForCausalLM",
    without=("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn"),
    fields=(
        MultiQuery(),
        Implied("num_key_value_heads", KV_HEADS, by=_kv_heads),
        Choice("activation_function", "layers.*.ffn.act", {"gelu_pytorch_tanh": "gelu_tanh", **ACTIVATIONS}),
    ),
    tensors=(
        # one block per KV head: its query heads, its key, its value
        *(
            Row(f"h.{{}}.attn.c_attn.{leaf}", *(f"{name}.{leaf}" for name in QKV), interleave="layers.{}.mixer.kv_heads")
            for leaf in ("weight", "bias")
        ),
        *rows("h.{}.attn.c_proj", "layers.{}.mixer.o"),
        *rows("h.{}.mlp.c_fc", "layers.{}.ffn.up"),
        *rows("h.{}.mlp.c_proj", "layers.{}.ffn.down"),
    ),
    ignored=(  # the precision of a softmax that is always in float32 here; kernels of older files
        *("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "inference_runner", "max_batch_size"),
        *("max_sequence_length", "pad_key_length", "pre_allocate_kv_cache", "validate_runner_input"),
    ),
)
