"""Falcon-H1: attention and Mamba-2 side by side in every layer, then a gated FFN; fixed factors (Zuo et al. 2025)."""

from __future__ import annotations

from math import inf, nextafter
from typing import Any

from dovetail.base.errors import SpecError
from dovetail.hf.dialect.llama import LLAMA
from dovetail.hf.expert import glu_rows
from dovetail.hf.field import ABSENT, Config, Copy, Field, LegacyFixed, Settings, integer, value_at
from dovetail.hf.state_space import TIME_STEP_LIMIT, GatedNorm, InnerWidth, TimeStepLimit, mamba2_rows, mamba_heads
from dovetail.hf.table import Row
from dovetail.model.model import Model

LAYER, SSM, SCALE = "layers.{}", "layers.*.ssm", "layers.*.mixer.scale"
FFN = ("gate", "up", "down")
NORM = {"kind": "rmsnorm", "eps": 1e-5}


class KeyMultiplier(Field):
    """A factor of the keys, and so of the scores: our scale is that factor over the root of the head size."""

    names = ("key_multiplier",)

    def to_hf(self, spec: Model) -> dict[str, Any]:
        scale, head = value_at(spec, SCALE), value_at(spec, "layers.*.mixer.head")
        if not isinstance(scale, float) or not isinstance(head, int):
            return {} if scale is ABSENT else {self.names[0]: 1.0}
        near = scale / head**-0.5  # rounded: a neighbor may be the one that gives the scale again
        neighbors = (near, nextafter(near, 0), nextafter(near, inf))
        return {self.names[0]: next((factor for factor in neighbors if factor * head**-0.5 == scale), near)}

    def from_hf(self, config: Config) -> Settings:
        factor = config.get(self.names[0])
        if factor is None or factor == 1:
            return {SCALE: None}
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not factor > 0:
            raise SpecError(f"config.{self.names[0]}", f"{factor!r} is not a number above 0")
        width, heads = integer(config, "hidden_size", 0), integer(config, "num_attention_heads", 32, 1)
        head = integer(config, "head_dim", width // heads, 1)
        if head < 1:
            raise SpecError("config.num_attention_heads", f"{heads} heads do not fit in a width of {width}")
        return {SCALE: factor * head**-0.5}


class FfnMultipliers(Field):
    """Two factors: of the gate before its activation, and of what the FFN returns."""

    names = ("mlp_multipliers",)
    paths = ("layers.*.ffn.gate_multiplier", "layers.*.ffn_out")

    def to_hf(self, spec: Model) -> dict[str, Any]:
        both = [value_at(spec, path) for path in self.paths]
        return {} if ABSENT in both else {self.names[0]: both}

    def from_hf(self, config: Config) -> Settings:
        both = config.get(self.names[0])
        if both is None:
            return {}
        if not isinstance(both, (list, tuple)) or len(both) != len(self.paths):
            raise SpecError(f"config.{self.names[0]}", f"{both!r} is not a pair of numbers")
        return dict(zip(self.paths, both, strict=True))


class MambaSizes(Field):
    """The inner width, given or as a multiple of the model's, and the heads that fill it; `auto` is the size that does."""

    names = ("mamba_d_ssm", "mamba_expand", "mamba_n_heads", "mamba_d_head")

    def to_hf(self, spec: Model) -> dict[str, Any]:
        inner, head = value_at(spec, f"{SSM}.inner"), value_at(spec, f"{SSM}.head")
        if not isinstance(inner, int) or not isinstance(head, int):
            return {}
        return {"mamba_d_ssm": inner, "mamba_n_heads": inner // head, "mamba_d_head": head}

    def from_hf(self, config: Config) -> Settings:
        inner = integer(config, "mamba_d_ssm", 0, 1) if "mamba_d_ssm" in config else 1024
        inner = inner or InnerWidth("mamba_expand", "inner").from_hf(config)["inner"]
        return {f"{SSM}.inner": inner, f"{SSM}.head": mamba_heads(config, inner)}


FALCON_H1 = LLAMA.variant(
    "falcon_h1",
    architecture="FalconH1ForCausalLM",
    spec={"norm": NORM},
    layer={"kind": "hybrid_block", "norm": NORM, "ssm": {"kind": "mamba2", "norm": None}},
    without=(
        *("pretraining_tp", "norm.weight", f"{LAYER}.post_attention_layernorm.weight"),
        *(f"{LAYER}.mlp.{name}_proj.{leaf}" for name in FFN for leaf in ("weight", "bias")),
    ),
    fields=(
        Copy("embedding_multiplier", "embed.scale"),
        Copy("lm_head_multiplier", "head.scale"),
        Copy("attention_in_multiplier", "layers.*.mixer_in"),
        Copy("attention_out_multiplier", "layers.*.mixer_out"),
        Copy("ssm_in_multiplier", "layers.*.ssm_in"),
        Copy("ssm_out_multiplier", "layers.*.ssm_out"),
        Copy("ssm_multipliers", f"{SSM}.multipliers"),
        FfnMultipliers(),
        KeyMultiplier(),
        MambaSizes(),
        GatedNorm(SSM, NORM),
        Copy("mamba_d_state", f"{SSM}.state_size"),
        Copy("mamba_d_conv", f"{SSM}.conv_size"),
        Copy("mamba_conv_bias", f"{SSM}.conv_bias"),
        TimeStepLimit(SSM),
        Copy("rms_norm_eps", "norm.eps", "layers.*.norm.eps", f"{SSM}:mamba2.norm:rmsnorm.eps"),
        LegacyFixed("attn_layer_indices", None),
        LegacyFixed("mamba_use_mlp", True),
    ),
    tensors=(
        *mamba2_rows(f"{LAYER}.mamba", f"{LAYER}.ssm"),
        Row(f"{LAYER}.pre_ff_layernorm.weight", f"{LAYER}.ffn_norm.scale"),
        *glu_rows(f"{LAYER}.feed_forward", f"{LAYER}.ffn"),
        *(Row(f"{LAYER}.feed_forward.{name}_proj.bias", f"{LAYER}.ffn.{name}.bias") for name in FFN),
        Row("final_layernorm.weight", "norm.scale"),
    ),
    # Mamba-2 has silu alone; with biases of its input, theirs has two on Δ that are added
    fixed={"hidden_act": "silu", "mamba_proj_bias": False, "projectors_bias": False},
    infinite=frozenset({TIME_STEP_LIMIT}),
    ignored=("mamba_chunk_size", "num_logits_to_keep", "mlp_expansion_factor", "time_step_rank"),
    defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "mamba_d_state": 256},
    limits=(),
)
