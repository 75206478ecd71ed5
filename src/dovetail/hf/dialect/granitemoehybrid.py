"""Granite 4: Mamba-2 and attention layers, experts beside a shared one or a dense FFN, Granite's multipliers (IBM 2025)."""

from __future__ import annotations

from typing import Any

from dovetail.base.errors import SpecError
from dovetail.hf.dialect.granite import AttentionMultiplier
from dovetail.hf.dialect.granitemoeshared import GRANITEMOESHARED, shared_rows
from dovetail.hf.expert import BalanceLoss
from dovetail.hf.field import ABSENT, Config, Copy, Field, Settings, depth_of, integer, is_kind, value_at
from dovetail.hf.layer import FULL, LAYER_TYPES
from dovetail.hf.rotary import Rotary
from dovetail.hf.state_space import TIME_STEP_LIMIT, InnerWidth, TimeStepLimit, mamba2_rows, mamba_heads
from dovetail.hf.table import Row
from dovetail.model.model import Model

LINEAR, OLDER = "linear_attention", {"mamba": "linear_attention", "attention": FULL}
MAMBA, ATTENTION, MOE = "layers.*.mixer:mamba2", "layers.*.mixer:attention", "layers.*.ffn:moe"
MIXER, POSITION = "layers.{}.mixer", "position_embedding_type"


class MixerTypes(Field):
    """The type of each layer: Mamba-2 or attention, which has RoPE where position_embedding_type is `rope`."""

    names = (LAYER_TYPES, "layers_block_type", POSITION)

    def to_hf(self, spec: Model) -> dict[str, Any]:
        rotated = value_at(spec, f"{ATTENTION}.position:rope") is not ABSENT
        types = [LINEAR if is_kind(value_at(layer, "mixer"), "mamba2") else FULL for layer in spec.layers]
        return {LAYER_TYPES: types, POSITION: "rope" if rotated else None}

    def from_hf(self, config: Config) -> Settings:
        count, position = depth_of(config, "num_hidden_layers"), config.get(POSITION)
        if position not in (None, "nope", "rope"):
            raise SpecError(f"config.{POSITION}", f"{position!r} is unsupported", "supported: rope, nope, null")
        listed = config.get(LAYER_TYPES) or config.get("layers_block_type") or [LINEAR] * count
        if not isinstance(listed, (list, tuple)) or len(listed) != count:
            raise SpecError(f"config.{LAYER_TYPES}", f"is not a list of {count} types, one per layer")
        words = [OLDER.get(word, word) for word in listed]
        for i, word in enumerate(words):
            if word not in (LINEAR, FULL):
                raise SpecError(f"config.{LAYER_TYPES}.{i}", f"{word!r} is unsupported", f"supported: {LINEAR}, {FULL}")
        mixers = {f"layers.{i}.mixer": {"kind": "mamba2"} for i, word in enumerate(words) if word == LINEAR}
        nope = {f"layers.{i}.mixer.position": "none" for i, word in enumerate(words) if word == FULL}
        return mixers if position == "rope" else {**mixers, **nope}


class RoutedExperts(Field):
    """Routed experts beside a shared one; without routed experts the shared one is a dense FFN."""

    names = ("num_local_experts", "shared_intermediate_size", "intermediate_size")

    def to_hf(self, spec: Model) -> dict[str, Any]:
        count = value_at(spec, f"{MOE}.experts")
        if count is ABSENT:
            size = value_at(spec, "layers.*.ffn.hidden")  # intermediate_size is unused then
            return {"num_local_experts": 0, "shared_intermediate_size": size, "intermediate_size": size}
        shared = value_at(spec, f"{MOE}.shared:glu.hidden")
        sizes = {} if shared is ABSENT else {"shared_intermediate_size": shared}
        return {"num_local_experts": count, "intermediate_size": value_at(spec, f"{MOE}.hidden"), **sizes}

    def from_hf(self, config: Config) -> Settings:
        count, shared = integer(config, "num_local_experts", 8), integer(config, "shared_intermediate_size", 1024, 1)
        if not count:
            return {"layers.*.ffn": {"kind": "glu", "hidden": shared}}
        sizes = {"experts": count, "hidden": config.get("intermediate_size"), "shared": {"kind": "glu", "hidden": shared}}
        return {"layers.*.ffn": {"kind": "moe", "router": "softmax_router", **sizes}}


class MambaHeads(Field):
    """The number and size of Mamba-2 heads, which fill the inner width; `auto` is the size that fills it."""

    names = ("mamba_n_heads", "mamba_d_head")

    def to_hf(self, spec: Model) -> dict[str, Any]:
        inner, head = value_at(spec, f"{MAMBA}.inner"), value_at(spec, f"{MAMBA}.head")
        both = isinstance(inner, int) and isinstance(head, int)
        return {"mamba_n_heads": inner // head, "mamba_d_head": head} if both else {}

    def from_hf(self, config: Config) -> Settings:
        return {f"{MAMBA}.head": mamba_heads(config, InnerWidth("mamba_expand", "inner").from_hf(config)["inner"])}


GRANITEMOEHYBRID = GRANITEMOESHARED.variant(
    "granitemoehybrid",
    architecture="GraniteMoeHybridForCausalLM",
    without=("layers.{}.self_attn.o_proj.weight", "layers.{}.self_attn.o_proj.bias"),
    fields=(
        MixerTypes(),
        RoutedExperts(),
        Copy("num_attention_heads", f"{ATTENTION}.heads"),
        Copy("num_key_value_heads", f"{ATTENTION}.kv_heads"),
        Copy("attention_dropout", f"{ATTENTION}.dropout"),
        AttentionMultiplier(ATTENTION),
        Copy("attention_bias", f"{ATTENTION}.bias", f"{ATTENTION}.out_bias"),
        Rotary(f"{ATTENTION}.position"),
        Copy("num_experts_per_tok", f"{MOE}.router.top_k"),
        BalanceLoss(f"{MOE}.router.balance_loss", "num_local_experts"),
        MambaHeads(),
        InnerWidth("mamba_expand", f"{MAMBA}.inner"),
        Copy("mamba_d_state", f"{MAMBA}.state_size"),
        Copy("mamba_n_groups", f"{MAMBA}.groups"),
        Copy("mamba_d_conv", f"{MAMBA}.conv_size"),
        Copy("mamba_conv_bias", f"{MAMBA}.conv_bias"),
        TimeStepLimit(MAMBA),
        Copy("rms_norm_eps", "norm.eps", "layers.*.norm.eps", f"{MAMBA}.norm.eps"),
    ),
    tensors=(
        *shared_rows("layers.{}.ffn.shared", where="layers.{}.ffn:moe"),
        *shared_rows("layers.{}.ffn", where="layers.{}.ffn:glu"),
        *mamba2_rows("layers.{}.mamba", MIXER),
        *(
            Row(f"layers.{{}}.self_attn.o_proj.{leaf}", f"{MIXER}.o.{leaf}", where=f"{MIXER}:attention")
            for leaf in ("weight", "bias")
        ),
    ),
    # Mamba-2 has silu alone; with biases, theirs has two on Δ that are added
    fixed={"hidden_act": "silu", "mamba_proj_bias": False},
    infinite=frozenset({TIME_STEP_LIMIT}),
    ignored=("mamba_chunk_size",),
    required=("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),  # there may be no attention
    defaults={
        "num_attention_heads": 32,
        "rms_norm_eps": 1e-6,
        "attention_multiplier": 1.0,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 1024,
        "mamba_d_state": 256,
    },
)
