"""Nemotron-H: layers of one branch each: Mamba-2, attention without positions, an FFN or experts (NVIDIA 2025).

Their models clamp the time step of a whole pass from below and not in decoding; ours does both.
"""

from __future__ import annotations

from typing import Any

from dovetail.base.errors import SpecError
from dovetail.base.limits import CONFIG_LAYERS
from dovetail.hf.expert import ExpertGroups
from dovetail.hf.field import ABSENT, ACTIVATIONS, Choice, Config, Copy, Field, Settings, integer, is_kind, value_at
from dovetail.hf.state_space import mamba2_rows
from dovetail.hf.table import HOUSEKEEPING, Dialect, Form, Row, Skip, rows
from dovetail.model.model import Model

NORM = {"kind": "rmsnorm", "eps": 1e-5}
LAYER, MAMBA, ATTENTION = "layers.{}", "layers.*.mixer:mamba2", "layers.*.mixer:attention"
MLP, MOE = "layers.*.ffn:mlp", "layers.*.ffn:moe"
MIXER, FFN = f"{LAYER}.mixer", f"{LAYER}.ffn"
TYPES, PATTERN, DEPTH = "layers_block_type", "hybrid_override_pattern", "num_hidden_layers"

DENSE = {"kind": "mlp", "act": "relu2", "bias": False}
EXPERTS = {
    "kind": "moe",
    "act": "relu2",
    "gated": False,
    "router": {"kind": "sigmoid_router", "balance_bias": True},
    "shared": DENSE,
}
# type of a layer -> its letter in the older pattern, its mixer, its ffn
BRANCHES: dict[str, tuple[str, Any, Any]] = {
    "linear_attention": ("M", {"kind": "mamba2", "norm": NORM}, None),
    "full_attention": ("*", {"kind": "attention", "position": "none"}, None),
    "mlp": ("-", None, DENSE),
    "moe": ("E", None, EXPERTS),
}
KINDS = {(mixer or ffn)["kind"]: word for word, (_, mixer, ffn) in BRANCHES.items()}
LETTERS = {letter: word for word, (letter, _, _) in BRANCHES.items()}
OLDER = {"mamba": "linear_attention", "attention": "full_attention"}


def layer_types(config: Config) -> list[str]:
    """The type of each layer, by the list or by the older pattern of letters."""
    listed, pattern = config.get(TYPES), config.get(PATTERN)
    if listed is None and isinstance(pattern, str):
        listed = [LETTERS.get(letter, letter) for letter in pattern[: CONFIG_LAYERS + 1]]
    elif listed is None:
        listed = ["linear_attention", "moe", "full_attention", "mlp"]
    if not isinstance(listed, (list, tuple)) or not listed:
        raise SpecError(f"config.{TYPES}", f"{listed!r} is not a list of types, one per layer")
    words = [OLDER.get(word, word) if isinstance(word, str) else repr(word) for word in listed]
    for i, word in enumerate(words):
        if word not in BRANCHES:
            raise SpecError(f"config.{TYPES}.{i}", f"{word!r} is unsupported", f"supported: {', '.join(BRANCHES)}")
    return words


class BlockTypes(Field):
    """The one branch of each layer."""

    names = (TYPES, PATTERN)

    def to_hf(self, spec: Model) -> dict[str, Any]:
        # a layer with two branches has the type of the first, and one without any that of a mixer: they differ when read back
        first = [next((part for part in (block.mixer, block.ffn) if part is not None), None) for block in spec.layers]
        types = [next((word for kind, word in KINDS.items() if is_kind(part, kind)), "linear_attention") for part in first]
        return {TYPES: types}

    def from_hf(self, config: Config) -> Settings:
        words = layer_types(config)
        if config.get(DEPTH) not in (None, len(words)):
            raise SpecError(f"config.{TYPES}", f"has {len(words)} types, not one for each of {config[DEPTH]} layers")
        mixers = {f"layers.{i}.mixer": BRANCHES[word][1] for i, word in enumerate(words)}
        return mixers | {f"layers.{i}.ffn": BRANCHES[word][2] for i, word in enumerate(words)}


class HeadsAndSize(Field):
    """The number and size of Mamba-2 heads, whose product is the inner width."""

    names = ("mamba_num_heads", "mamba_head_dim")

    def to_hf(self, spec: Model) -> dict[str, Any]:
        inner, head = value_at(spec, f"{MAMBA}.inner"), value_at(spec, f"{MAMBA}.head")
        both = isinstance(inner, int) and isinstance(head, int)
        return {"mamba_num_heads": inner // head, "mamba_head_dim": head} if both else {}

    def from_hf(self, config: Config) -> Settings:
        count, head = integer(config, "mamba_num_heads", 128, 1), integer(config, "mamba_head_dim", 64, 1)
        return {f"{MAMBA}.inner": count * head, f"{MAMBA}.head": head}


class Latent(Field):
    """The width in which experts work."""

    names = ("moe_latent_size",)

    def to_hf(self, spec: Model) -> dict[str, Any]:
        size = value_at(spec, f"{MOE}.latent")
        return {} if size is ABSENT else {self.names[0]: size}

    def from_hf(self, config: Config) -> Settings:
        size = config.get(self.names[0])
        if size is not None and config.get("mlp_bias"):
            problem = f"is true, but the projections to and from a latent of {size} have no bias here"
            raise SpecError("config.mlp_bias", problem, "supported with moe_latent_size: false")
        return {f"{MOE}.latent": size}


NEMOTRON_H = Dialect(
    name="nemotron_h",
    forms=(Form(architecture="NemotronHForCausalLM", prefix="backbone.", tensors=(Row("lm_head.weight", "head.out.weight"),)),),
    spec={
        "norm": NORM,
        "head": {"kind": "lm", "tied": False},
        "init": {"kind": "normal", "residual": False},
        "layers": [{"norm": NORM, "mixer": BRANCHES["linear_attention"][1], "ffn": None}],
    },
    layers=DEPTH,
    fallbacks={DEPTH: lambda config: len(layer_types(config))},
    required=("vocab_size", "hidden_size"),
    fields=(
        BlockTypes(),
        Copy("vocab_size", "vocab"),
        Copy("hidden_size", "width"),
        HeadsAndSize(),
        Copy("ssm_state_size", f"{MAMBA}.state_size"),
        Copy("n_groups", f"{MAMBA}.groups", f"{MAMBA}.norm.groups"),
        Copy("conv_kernel", f"{MAMBA}.conv_size"),
        Copy("use_conv_bias", f"{MAMBA}.conv_bias"),
        Copy("time_step_min", f"{MAMBA}.dt_min"),
        Copy("num_attention_heads", f"{ATTENTION}.heads"),
        Copy("num_key_value_heads", f"{ATTENTION}.kv_heads"),
        Copy("head_dim", f"{ATTENTION}.head"),
        Copy("attention_dropout", f"{ATTENTION}.dropout"),
        Copy("intermediate_size", f"{MLP}.hidden"),
        Copy("mlp_bias", f"{MLP}.bias", f"{MOE}.shared:mlp.bias"),
        Choice("mlp_hidden_act", f"{MLP}.act", ACTIVATIONS, also=(f"{MOE}.act", f"{MOE}.shared:mlp.act")),
        Copy("n_routed_experts", f"{MOE}.experts"),
        Copy("num_experts_per_tok", f"{MOE}.router.top_k"),
        Copy("norm_topk_prob", f"{MOE}.router.normalize"),
        Copy("routed_scaling_factor", f"{MOE}.router.scale"),
        ExpertGroups(f"{MOE}.router"),
        Copy("moe_intermediate_size", f"{MOE}.hidden"),
        Copy("moe_shared_expert_intermediate_size", f"{MOE}.shared:mlp.hidden"),
        Latent(),
        Copy("layer_norm_epsilon", "norm.eps", "layers.*.norm.eps", f"{MAMBA}.norm.eps"),
        Copy("initializer_range", "init.spread"),
    ),
    # their code reads neither attention_bias nor a window and ties nothing; with use_bias, two biases of Δ are added
    fixed={
        "attention_bias": False,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_bias": False,
        "mamba_hidden_act": "silu",
    },
    aliases={
        "layer_types": TYPES,
        "mamba_n_groups": "n_groups",
        "mamba_d_conv": "conv_kernel",
        "mamba_dt_min": "time_step_min",
        "mamba_conv_bias": "use_conv_bias",
        "num_local_experts": "n_routed_experts",
    },
    ignored=HOUSEKEEPING
    | {"time_step_max", "time_step_floor", "time_step_limit", "rescale_prenorm_residual"}  # initialization, or unread
    | {"mamba_dt_max", "mamba_dt_init_floor", "mamba_dt_limit", "mamba_expand", "expand", "mamba_proj_bias"}
    | {"chunk_size", "mamba_chunk_size", "use_mamba_kernels", "mamba_ssm_cache_dtype", "residual_in_fp32"}  # kernels
    | {"hidden_dropout", "max_position_embeddings", "n_shared_experts", "moe_shared_expert_overlap"}
    | {"num_logits_to_keep", "output_router_logits", "mtp_layers_block_type", "mtp_hybrid_override_pattern"},
    reset={"num_nextn_predict_layers": 0},
    skips=(Skip("mtp.*", "multi-token prediction, which transformers does not run either"),),
    defaults={
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 21504,
        "ssm_state_size": 128,
        "n_groups": 8,
        "time_step_min": 0.001,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "n_group": 1,
        "topk_group": 1,
    },
    tensors=(
        Row("embeddings.weight", "embed.table"),
        Row(f"{LAYER}.norm.weight", f"{LAYER}.mixer_norm.scale", where=MIXER),
        Row(f"{LAYER}.norm.weight", f"{LAYER}.ffn_norm.scale", where=FFN),
        *mamba2_rows(MIXER, MIXER),
        *(
            Row(f"{MIXER}.{name}_proj.weight", f"{MIXER}.{name}.weight", where=f"{MIXER}:attention")
            for name in ("q", "k", "v", "o")
        ),
        *(
            row
            for name in ("up", "down")
            for row in (
                *rows(f"{MIXER}.{name}_proj", f"{FFN}.{name}", where=f"{FFN}:mlp"),
                *rows(f"{MIXER}.shared_experts.{name}_proj", f"{FFN}.shared.{name}"),
                Row(f"{MIXER}.experts.{{expert}}.{name}_proj.weight", f"{FFN}.bank.{name}.weight"),
            )
        ),
        Row(f"{MIXER}.gate.weight", f"{FFN}.router.out.weight"),
        Row(f"{MIXER}.gate.e_score_correction_bias", f"{FFN}.router.balance"),
        Row(f"{MIXER}.fc1_latent_proj.weight", f"{FFN}.to_latent.weight"),
        Row(f"{MIXER}.fc2_latent_proj.weight", f"{FFN}.from_latent.weight"),
        Row("norm_f.weight", "norm.scale"),
    ),
)
