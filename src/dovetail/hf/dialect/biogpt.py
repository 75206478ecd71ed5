"""BioGPT: OPT with a scaled embedding (Luo et al. 2022)."""

from __future__ import annotations

from dovetail.hf.dialect.opt import OPT
from dovetail.hf.field import ACTIVATIONS, Choice, Copy
from dovetail.hf.table import LAYERNORM, Form, Row, rows

BIOGPT = OPT.variant(
    "biogpt",
    forms=(
        Form(architecture="BioGptForCausalLM", prefix="biogpt.", tensors=(Row("output_projection.weight", "head.out.weight"),)),
    ),
    spec={"embed": {"kind": "tokens", "scale_by_width": True}},
    layer={"mixer": {"dropout": 0.1}, "ffn": {"kind": "mlp", "act": "gelu"}},
    without=(
        *("word_embed_proj_dim", "ffn_dim", "dropout", "attention_dropout", "enable_bias", "init_std", "activation_function"),
        *("do_layer_norm_before", "_remove_final_layer_norm", "layer_norm_elementwise_affine"),
        *("final_layer_norm.weight", "final_layer_norm.bias"),
    ),
    fields=(
        Copy("intermediate_size", "layers.*.ffn.hidden"),
        Copy("scale_embedding", "embed.scale_by_width"),
        Copy("hidden_dropout_prob", "dropout", "layers.*.wire.dropout"),
        Copy("attention_probs_dropout_prob", "layers.*.mixer.dropout"),
        Copy("activation_dropout", "layers.*.ffn.dropout"),
        Copy("initializer_range", "init.spread"),
        Choice("hidden_act", "layers.*.ffn.act", ACTIVATIONS),
    ),
    tensors=rows("layer_norm", "norm", *LAYERNORM),
    ignored=("layer_norm_eps",),  # their norms have 1e-5 whatever it is
    defaults={"hidden_dropout_prob": 0.1, "max_position_embeddings": 1024},
)
