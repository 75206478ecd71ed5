"""Mamba: layers of selective state spaces alone, without an ffn (Gu & Dao 2023)."""

from __future__ import annotations

from dovetail.port.space import Expand, Rank, selective
from dovetail.port.table import HOUSEKEEPING, Dialect, Form, Row, Same

FIRST = ("time_step_min", "time_step_max", "time_step_floor", "rescale_prenorm_residual")  # initialization only

MAMBA = Dialect(
    name="mamba",
    forms=(Form(architecture="MambaForCausalLM", prefix="backbone.", tensors=(Row("lm_head.weight", "head.table"),)),),
    spec={
        "norm": "rmsnorm",
        "head": {"kind": "lm", "tied": True},
        "init": {"kind": "normal", "residual": False},
        "layers": [{"norm": "rmsnorm", "mixer": "mamba", "ffn": None}],
    },
    layers="num_hidden_layers",
    required=("vocab_size", "hidden_size", "num_hidden_layers"),
    fields=(
        Same("vocab_size", "vocab"),
        Same("hidden_size", "width"),
        Same("state_size", "layers.*.mixer.state_size"),
        Same("conv_kernel", "layers.*.mixer.conv_size"),
        Same("use_bias", "layers.*.mixer.bias"),
        Same("use_conv_bias", "layers.*.mixer.conv_bias"),
        Same("layer_norm_epsilon", "norm.eps", "layers.*.norm.eps"),
        Same("tie_word_embeddings", "head.tied"),
        Same("initializer_range", "init.spread"),
        Expand("expand", "layers.*.mixer.inner", also="intermediate_size"),
        Rank("time_step_rank", "layers.*.mixer.rank"),
    ),
    defaults={"initializer_range": 0.1},
    fixed={"hidden_act": "silu"},
    tensors=(
        Row("embeddings.weight", "embed.table"),
        Row("layers.{}.norm.weight", "layers.{}.mixer_norm.scale"),
        *selective("layers.{}.mixer", "layers.{}.mixer"),
        Row("norm_f.weight", "norm.scale"),
    ),
    ignored=HOUSEKEEPING
    | {*FIRST, "time_step_scale", "time_step_init_scheme"}
    | {"residual_in_fp32", "use_mambapy", "use_associative_scan"},  # how it is computed, not what
)
