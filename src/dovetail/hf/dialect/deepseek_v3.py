"""DeepSeek-V3: MLA, dense layers first, then grouped experts balanced by a bias, multi-token prediction (DeepSeek-AI 2024).

MLA has YaRN with two more parameters. With m(x) = 0.1·x·ln(factor) + 1, cos and sin are multiplied by
m(mscale)/m(mscale_all_dim) and all scores by m(mscale_all_dim)²: our `attention` of the scaling, and `scale` of the mixer. Of
its two matrices one packs the latent and the rotary key, the other keys and values per head.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import log, sqrt
from typing import Any

from dovetail.base.errors import SpecError
from dovetail.hf.convert import CONCAT
from dovetail.hf.dialect.llama import LLAMA, NORM
from dovetail.hf.expert import ExpertGroups, FirstDense, SharedExperts, expert_rows, glu_rows
from dovetail.hf.field import (
    ABSENT,
    ACTIVATIONS,
    Choice,
    Config,
    Copy,
    Field,
    Implied,
    LegacyFixed,
    Nullable,
    Settings,
    Switch,
    integer,
    value_at,
)
from dovetail.hf.rotary import Rotary
from dovetail.hf.table import Ahead, Row, ahead_rows
from dovetail.model.model import Model

MIXER = "layers.*.mixer"
EXPERTS, PLAIN, LAYER = "layers.*.ffn:moe", "layers.*.ffn:glu", "layers.{}"
ROUTER = f"{EXPERTS}.router"
OLDER = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}


class MLARope(Rotary):
    """RoPE of the rotary channels, and the factor by which YaRN scales the scores."""

    def to_hf(self, spec: Model) -> dict[str, Any]:
        written = super().to_hf(spec)
        scale, factor = value_at(spec, f"{MIXER}.scale"), value_at(spec, f"{self.path}.scaling.factor")
        if scale not in (None, ABSENT) and isinstance(factor, float) and factor > 1 and "rope_parameters" in written:
            head = value_at(spec, f"{MIXER}.nope") + value_at(spec, f"{MIXER}.rope")
            found = (sqrt(scale * sqrt(head)) - 1) / (0.1 * log(factor))
            exact = [x for digits in (3, 6, 9, 12, 15, 17) if score_scale(x := round(found, digits), factor, head) == scale]
            written["rope_parameters"] |= {"mscale_all_dim": exact[0]} if exact else {}
        return written

    def from_hf(self, config: Config) -> Settings:
        name = next((name for name in ("rope_parameters", "rope_scaling") if config.get(name)), None)
        own = {} if name is None else config[name]
        if not isinstance(own, Mapping) or own.get("rope_type", own.get("type")) != "yarn":
            return {**super().from_hf(config), f"{MIXER}.scale": None}
        own = dict(own)
        one, whole_head, factor = own.pop("mscale", None), own.pop("mscale_all_dim", None), own.get("factor", 1.0)
        for value in (one, whole_head, factor):
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
                raise SpecError(f"config.{name}", f"{value!r} is not a number")
        if one and whole_head:
            own.setdefault("attention_factor", yarn_mscale(one, factor) / yarn_mscale(whole_head, factor))
        head = integer(config, "qk_nope_head_dim", 128) + integer(config, "qk_rope_head_dim", 64)
        scale = score_scale(whole_head, factor, head) if whole_head else None
        return {**super().from_hf({**config, str(name): own}), f"{MIXER}.scale": scale}


def yarn_mscale(x: float, factor: float) -> float:
    """YaRN's m(x): the growth of scores with the length of the context."""
    return 0.1 * x * log(factor) + 1.0 if factor > 1 else 1.0


def score_scale(x: float, factor: float, head: int) -> float:
    """The scale of the scores for this head size."""
    return head**-0.5 * yarn_mscale(x, factor) ** 2


def mla_fields() -> tuple[Field, ...]:
    """The config fields of MLA."""
    return (
        Copy("num_attention_heads", f"{MIXER}.heads"),
        Implied("num_key_value_heads", f"{MIXER}.heads", by=lambda config: config.get("num_attention_heads")),
        Implied("head_dim", f"{MIXER}.rope", by=lambda config: config.get("qk_rope_head_dim")),
        Copy("kv_lora_rank", f"{MIXER}.kv_rank"),
        Nullable("q_lora_rank", f"{MIXER}.q_rank"),
        Copy("qk_nope_head_dim", f"{MIXER}.nope"),
        Copy("qk_rope_head_dim", f"{MIXER}.rope"),
        Copy("v_head_dim", f"{MIXER}.value"),
        Switch("rope_interleave", f"{MIXER}.position.pairs", on="adjacent", off="half"),
        MLARope(f"{MIXER}.position", head="rope"),
    )


def mla_tensors(hf_module: str, module: str) -> tuple[Row, ...]:
    """Rows of one MLA layer, but for its output matrix."""
    rank = f"{module}.q_rank"
    return (
        Row(f"{hf_module}.q_proj.weight", f"{module}.q.weight", unless=rank),
        Row(f"{hf_module}.q_b_proj.weight", f"{module}.q.weight", where=rank),
        Row(f"{hf_module}.q_a_proj.weight", f"{module}.q_down.weight"),
        Row(f"{hf_module}.q_a_layernorm.weight", f"{module}.q_norm.scale"),
        Row(f"{hf_module}.kv_a_proj_with_mqa.weight", f"{module}.kv_down.weight", f"{module}.turned.weight", convert=CONCAT),
        Row(f"{hf_module}.kv_a_layernorm.weight", f"{module}.kv_norm.scale"),
        Row(f"{hf_module}.kv_b_proj.weight", f"{module}.k_up.weight", f"{module}.v_up.weight", interleave=f"{module}.heads"),
    )


BACKBONE = LLAMA.variant(
    "deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    layer={
        "mixer": {"kind": "mla", "norm": NORM, "position": {"kind": "rope", "pairs": "adjacent"}},
        "ffn": {
            "kind": "moe",
            "router": {"kind": "sigmoid_router", "balance_bias": True, "scale": 2.5},
            "shared": {"kind": "glu"},
        },
    },
    without=("mlp_bias",),
    fields=(
        *mla_fields(),
        FirstDense("first_k_dense_replace", "num_hidden_layers", 3),
        ExpertGroups(ROUTER),
        Copy("n_routed_experts", f"{EXPERTS}.experts"),
        Copy("num_experts_per_tok", f"{ROUTER}.top_k"),
        Copy("norm_topk_prob", f"{ROUTER}.normalize"),
        Copy("routed_scaling_factor", f"{ROUTER}.scale"),
        Copy("moe_intermediate_size", f"{EXPERTS}.hidden"),
        SharedExperts("n_shared_experts", "moe_intermediate_size", f"{EXPERTS}.shared.hidden", f"{EXPERTS}.hidden"),
        Copy("intermediate_size", f"{PLAIN}.hidden"),
        Choice("hidden_act", "layers.*.ffn.act", ACTIVATIONS, also=(f"{EXPERTS}.shared.act",)),
        *(LegacyFixed(name, value) for name, value in OLDER.items()),
    ),
    tensors=(
        *mla_tensors(f"{LAYER}.self_attn", f"{LAYER}.mixer"),
        Row(f"{LAYER}.mlp.gate.weight", f"{LAYER}.ffn.router.out.weight"),
        Row(f"{LAYER}.mlp.gate.e_score_correction_bias", f"{LAYER}.ffn.router.balance"),
        *expert_rows(f"{LAYER}.mlp.experts.{{expert}}", f"{LAYER}.ffn.bank"),
        *glu_rows(f"{LAYER}.mlp.shared_experts", f"{LAYER}.ffn.shared"),
    ),
    fixed={"attention_bias": False},
    ignored=("ep_size", "seq_aux", "aux_loss_alpha", "output_router_logits", "qk_head_dim"),
    required=("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    defaults={
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
    limits=(),
)

# a depth of multi-token prediction is the layer after the last one, and has the embedding and the head once more
NEXT = "layers.{after}"
DEEPSEEK_V3 = BACKBONE.variant(
    "deepseek_v3",
    tensors=ahead_rows(
        BACKBONE.tensors,
        NEXT,
        (f"{NEXT}.enorm.weight", "embed_norm.scale"),
        (f"{NEXT}.hnorm.weight", "hidden_norm.scale"),
        (f"{NEXT}.eh_proj.weight", "proj.weight"),
        (f"{NEXT}.shared_head.norm.weight", "norm.scale"),
    ),
    ahead=Ahead(
        count="num_nextn_predict_layers",
        marker=f"model.{NEXT}.eh_proj.weight",
        default=1,
        copies={f"model.{NEXT}.embed_tokens.weight": "embed.table", f"model.{NEXT}.shared_head.head.weight": "head.out.weight"},
    ),
)
