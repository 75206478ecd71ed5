"""GPT-Neo: GPT-2 with unscaled scores and a window in every other layer (Black et al. 2021)."""

from __future__ import annotations

from typing import Any

from dovetail.base.errors import SpecError
from dovetail.hf.dialect.gpt2 import GPT2
from dovetail.hf.field import ACTIVATIONS, Choice, Config, Copy, Field, Settings, depth_of, integer, value_at
from dovetail.hf.layer import window_mask, window_of
from dovetail.hf.table import Row, rows
from dovetail.model.model import Model

TYPES, LAYERS, WINDOW = "attention_types", "num_layers", "window_size"
DEFAULT_TYPES = [[["global", "local"], 12]]


class AttentionTypes(Field):
    """Lists of types with the number of times each is repeated; `attention_layers` is the same, written out."""

    names = (TYPES, "attention_layers", WINDOW)

    def to_hf(self, spec: Model) -> dict[str, Any]:
        windows = [window_of(value_at(block, "mixer.mask")) for block in spec.layers]
        sizes = {size for size in windows if size is not None}
        types = ["global" if size is None else "local" for size in windows]
        return {TYPES: [[types, 1]], "attention_layers": types, **({WINDOW: min(sizes)} if sizes else {})}

    def from_hf(self, config: Config) -> Settings:
        count, window, types = depth_of(config, LAYERS), integer(config, WINDOW, 256, 1), config.get(TYPES) or DEFAULT_TYPES
        try:
            words = [word for group, times in types for word in list(group) * min(int(times), count)]
        except (TypeError, ValueError):
            raise SpecError(f"config.{TYPES}", f"{types!r} is not a list of [[types], times]") from None
        if len(words) != count or any(word not in ("global", "local") for word in words):
            raise SpecError(f"config.{TYPES}", f"does not give one of global, local for each of {count} layers")
        if config.get("attention_layers") not in (None, words):
            raise SpecError("config.attention_layers", f"is not what config.{TYPES} says")
        return {f"layers.{i}.mixer.mask": window_mask(window) for i, word in enumerate(words) if word == "local"}


GPT_NEO = GPT2.variant(
    "gpt_neo",
    architecture="GPTNeoForCausalLM",
    spec={"dropout": 0.0},
    layer={"wire": {"kind": "pre_norm", "dropout": 0.0}, "mixer": {"scale": 1.0, "bias": False, "dropout": 0.0}},
    without=(
        *("n_embd", "n_positions", "n_head", "n_inner", "resid_pdrop", "attn_pdrop", "embd_pdrop", "scale_attn_weights"),
        *("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention"),
        *(f"h.{{}}.attn.{name}.{leaf}" for name in ("c_attn", "c_proj") for leaf in ("weight", "bias")),
    ),
    layers=LAYERS,
    fields=(
        AttentionTypes(),
        Copy("hidden_size", "width"),
        Copy("max_position_embeddings", "position.length"),
        Copy("num_heads", "layers.*.mixer.heads"),
        Copy("intermediate_size", "layers.*.ffn.hidden"),
        Copy("resid_dropout", "layers.*.wire.dropout"),
        Copy("embed_dropout", "dropout"),
        Copy("attention_dropout", "layers.*.mixer.dropout"),
        Choice("activation_function", "layers.*.ffn.act", {"gelu_new": "gelu_tanh", **ACTIVATIONS}),
    ),
    tensors=(
        *(Row(f"h.{{}}.attn.attention.{name}_proj.weight", f"layers.{{}}.mixer.{name}.weight") for name in "qkv"),
        *rows("h.{}.attn.attention.out_proj", "layers.{}.mixer.o"),
        *rows("h.{}.mlp.c_fc", "layers.{}.ffn.up"),
        *rows("h.{}.mlp.c_proj", "layers.{}.ffn.down"),
    ),
    required=("vocab_size", "hidden_size", LAYERS, "num_heads"),
    defaults={"max_position_embeddings": 2048},
    ignored=("classifier_dropout",),
)
