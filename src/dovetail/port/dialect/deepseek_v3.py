"""DeepSeek-V3: latent attention, dense layers first, then experts chosen in groups and balanced by a bias (DeepSeek-AI 2024).

YaRN of theirs has two words more: `mscale` and `mscale_all_dim`. With m(x) = 0.1·x·ln(factor) + 1, cos and sin are multiplied
by m(mscale)/m(mscale_all_dim) and all scores by m(mscale_all_dim)²: our `attention` of the scaling, and `scale` of the mixer.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import log, sqrt
from typing import Any

from dovetail.core.errors import SpecError
from dovetail.model import Model
from dovetail.port.convert import STACK
from dovetail.port.dialect.llama import LLAMA, NORM
from dovetail.port.expert import FirstDense, Shared, bank, glu, whole
from dovetail.port.rotary import Rotary
from dovetail.port.table import ABSENT, ACTIVATIONS, Config, Follows, Named, Nullable, Only, Row, Same, Settings, Switch, look

MIXER, EXPERTS, PLAIN = "layers.*.mixer", "layers.*.ffn:experts", "layers.*.ffn:glu"
ROUTER, LAYER = f"{EXPERTS}.router", "layers.{}"
OLDER = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}


class Turning(Rotary):
    """Rope of the channels that turn, and what YaRN of theirs does to scores."""

    def give(self, spec: Model) -> dict[str, Any]:
        said = super().give(spec)
        scale, factor = look(spec, f"{MIXER}.scale"), look(spec, f"{self.ours}.scaling.factor")
        if scale not in (None, ABSENT) and isinstance(factor, float) and factor > 1 and "rope_parameters" in said:
            asked = look(spec, f"{MIXER}.nope") + look(spec, f"{MIXER}.rope")
            found = (sqrt(scale * sqrt(asked)) - 1) / (0.1 * log(factor))
            exact = [x for digits in (3, 6, 9, 12, 15, 17) if sharper(x := round(found, digits), factor, asked) == scale]
            said["rope_parameters"] |= {"mscale_all_dim": exact[0]} if exact else {}
        return said

    def take(self, config: Config) -> Settings:
        name = next((name for name in ("rope_parameters", "rope_scaling") if config.get(name)), None)
        own = {} if name is None else config[name]
        if not isinstance(own, Mapping) or own.get("rope_type", own.get("type")) != "yarn":
            return {**super().take(config), f"{MIXER}.scale": None}
        own = dict(own)
        one, whole_head, factor = own.pop("mscale", None), own.pop("mscale_all_dim", None), own.get("factor", 1.0)
        for value in (one, whole_head, factor):
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
                raise SpecError(f"config.{name}", f"{value!r} is not a number")
        if one and whole_head:
            own.setdefault("attention_factor", grown(one, factor) / grown(whole_head, factor))
        asked = whole(config, "qk_nope_head_dim", 128) + whole(config, "qk_rope_head_dim", 64)
        scale = sharper(whole_head, factor, asked) if whole_head else None
        return {**super().take({**config, str(name): own}), f"{MIXER}.scale": scale}


def grown(x: float, factor: float) -> float:
    """How much larger numbers get with a text so much longer."""
    return 0.1 * x * log(factor) + 1.0 if factor > 1 else 1.0


def sharper(x: float, factor: float, asked: int) -> float:
    """The scale of scores of heads of so many channels."""
    return asked**-0.5 * grown(x, factor) ** 2


class Groups:
    """Groups of experts, of which the best are chosen from; where all of them are, there are none."""

    names = ("n_group", "topk_group")

    def give(self, spec: Model) -> dict[str, Any]:
        groups, best = look(spec, f"{ROUTER}.groups"), look(spec, f"{ROUTER}.top_groups")
        return {} if groups is ABSENT else {"n_group": groups, "topk_group": best}

    def take(self, config: Config) -> Settings:
        groups, best = whole(config, "n_group", 8, 1), whole(config, "topk_group", 4, 1)
        limits = best < groups
        return {f"{ROUTER}.groups": groups if limits else 1, f"{ROUTER}.top_groups": best if limits else 1}


DEEPSEEK_V3 = LLAMA.but(
    "deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    layer={
        "mixer": {"kind": "latent", "norm": NORM, "position": {"kind": "rope", "pairs": "adjacent"}},
        "ffn": {
            "kind": "experts",
            "router": {"kind": "sigmoid_router", "balance_bias": True, "scale": 2.5},
            "shared": {"kind": "glu"},
        },
    },
    without=("mlp_bias",),
    fields=(
        Same("num_attention_heads", f"{MIXER}.heads"),
        Follows("num_key_value_heads", f"{MIXER}.heads", said=lambda config: config.get("num_attention_heads")),
        Follows("head_dim", f"{MIXER}.rope", said=lambda config: config.get("qk_rope_head_dim")),
        Same("kv_lora_rank", f"{MIXER}.kv_rank"),
        Nullable("q_lora_rank", f"{MIXER}.q_rank"),
        Same("qk_nope_head_dim", f"{MIXER}.nope"),
        Same("qk_rope_head_dim", f"{MIXER}.rope"),
        Same("v_head_dim", f"{MIXER}.value"),
        Switch("rope_interleave", f"{MIXER}.position.pairs", on="adjacent", off="half"),
        Turning(f"{MIXER}.position", head="rope"),
        FirstDense("first_k_dense_replace", "num_hidden_layers", 3),
        Groups(),
        Same("n_routed_experts", f"{EXPERTS}.experts"),
        Same("num_experts_per_tok", f"{ROUTER}.top_k"),
        Same("norm_topk_prob", f"{ROUTER}.normalise"),
        Same("routed_scaling_factor", f"{ROUTER}.scale"),
        Same("moe_intermediate_size", f"{EXPERTS}.hidden"),
        Shared("n_shared_experts", "moe_intermediate_size", f"{EXPERTS}.shared.hidden", f"{EXPERTS}.hidden"),
        Same("intermediate_size", f"{PLAIN}.hidden"),
        Named("hidden_act", "layers.*.ffn.act", ACTIVATIONS, also=(f"{EXPERTS}.shared.act",)),
        *(Only(name, value) for name, value in OLDER.items()),
    ),
    tensors=(
        Row(f"{LAYER}.self_attn.q_proj.weight", f"{LAYER}.mixer.q.weight", unless=f"{LAYER}.mixer.q_rank"),
        Row(f"{LAYER}.self_attn.q_b_proj.weight", f"{LAYER}.mixer.q.weight", where=f"{LAYER}.mixer.q_rank"),
        Row(f"{LAYER}.self_attn.q_a_proj.weight", f"{LAYER}.mixer.q_down.weight"),
        Row(f"{LAYER}.self_attn.q_a_layernorm.weight", f"{LAYER}.mixer.q_norm.scale"),
        Row(
            f"{LAYER}.self_attn.kv_a_proj_with_mqa.weight",
            f"{LAYER}.mixer.kv_down.weight",
            f"{LAYER}.mixer.turned.weight",
            convert=STACK,
        ),
        Row(f"{LAYER}.self_attn.kv_a_layernorm.weight", f"{LAYER}.mixer.kv_norm.scale"),
        Row(
            f"{LAYER}.self_attn.kv_b_proj.weight",
            f"{LAYER}.mixer.k_up.weight",
            f"{LAYER}.mixer.v_up.weight",
            woven=f"{LAYER}.mixer.heads",
        ),
        Row(f"{LAYER}.mlp.gate.weight", f"{LAYER}.ffn.router.weight"),
        Row(f"{LAYER}.mlp.gate.e_score_correction_bias", f"{LAYER}.ffn.router.balance"),
        *bank(f"{LAYER}.mlp.experts.{{expert}}", f"{LAYER}.ffn.bank"),
        *glu(f"{LAYER}.mlp.shared_experts", f"{LAYER}.ffn.shared"),
    ),
    fixed={"attention_bias": False},
    # what is predicted beyond the next token lies in a layer after the last, which is not read
    ignored=("num_nextn_predict_layers", "ep_size", "seq_aux", "aux_loss_alpha", "output_router_logits", "qk_head_dim"),
    stale=("*.rotary_emb.inv_freq", "model.layers.61.*"),
    required=(*LLAMA.required, "moe_intermediate_size", "n_routed_experts"),
    defaults={"rope_interleave": True, "num_experts_per_tok": 8},
    limits=(),
)
