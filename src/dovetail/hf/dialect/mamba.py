"""Mamba: selective state-space layers without FFNs (Gu & Dao 2023)."""

from __future__ import annotations

from dovetail.hf.field import Copy
from dovetail.hf.state_space import InnerWidth, TimeStepRank, mamba_rows
from dovetail.hf.table import HOUSEKEEPING, Dialect, Form, Row

FIRST = ("time_step_min", "time_step_max", "time_step_floor", "rescale_prenorm_residual")  # initialization only

MAMBA = Dialect(
    name="mamba",
    forms=(Form(architecture="MambaForCausalLM", prefix="backbone.", tensors=(Row("lm_head.weight", "head.out.weight"),)),),
    spec={
        "norm": "rmsnorm",
        "head": {"kind": "lm", "tied": True},
        "init": {"kind": "normal", "residual": False},
        "layers": [{"norm": "rmsnorm", "mixer": "mamba", "ffn": None}],
    },
    required=("vocab_size", "hidden_size", "num_hidden_layers"),
    fields=(
        Copy("vocab_size", "vocab"),
        Copy("hidden_size", "width"),
        Copy("state_size", "layers.*.mixer.state_size"),
        Copy("conv_kernel", "layers.*.mixer.conv_size"),
        Copy("use_bias", "layers.*.mixer.bias"),
        Copy("use_conv_bias", "layers.*.mixer.conv_bias"),
        Copy("layer_norm_epsilon", "norm.eps", "layers.*.norm.eps"),
        Copy("tie_word_embeddings", "head.tied"),
        Copy("initializer_range", "init.spread"),
        InnerWidth("expand", "layers.*.mixer.inner", also="intermediate_size"),
        TimeStepRank("time_step_rank", "layers.*.mixer.rank"),
    ),
    defaults={"initializer_range": 0.1},
    fixed={"hidden_act": "silu"},
    tensors=(
        Row("embeddings.weight", "embed.table"),
        Row("layers.{}.norm.weight", "layers.{}.mixer_norm.scale"),
        *mamba_rows("layers.{}.mixer", "layers.{}.mixer"),
        Row("norm_f.weight", "norm.scale"),
    ),
    ignored=HOUSEKEEPING
    | {*FIRST, "time_step_scale", "time_step_init_scheme"}
    | {"residual_in_fp32", "use_mambapy", "use_associative_scan"},  # kernels and precision
)
