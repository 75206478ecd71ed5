"""GPT-J: attention and ffn side by side behind one norm; adjacent channels turn as a pair (Wang & Komatsuzaki 2021)."""

from __future__ import annotations

from typing import Any

from dovetail.core.errors import SpecError
from dovetail.model import Model
from dovetail.port.table import (
    ACTIVATIONS,
    HOUSEKEEPING,
    LAYERNORM,
    Config,
    Dialect,
    Form,
    Named,
    Row,
    Same,
    Settings,
    Skip,
    look,
    rows,
)

ROPE = {"kind": "rope", "pairs": "adjacent"}
LAYER = {
    "norm": "layernorm",
    "wire": "parallel",
    "mixer": {"kind": "attention", "position": ROPE},
    "ffn": {"kind": "mlp", "act": "gelu_tanh"},
}


class RotaryDim:
    """How many channels of a head turn; null: all."""

    names = ("rotary_dim",)

    def give(self, spec: Model) -> dict[str, Any]:
        share, head = look(spec, "layers.*.mixer.position.fraction"), look(spec, "layers.*.mixer.head")
        both = isinstance(share, float) and isinstance(head, int)
        return {self.names[0]: round(share * head)} if both else {}

    def take(self, config: Config) -> Settings:
        turning, width, heads = config.get("rotary_dim"), config.get("n_embd"), config.get("n_head")
        if turning is None:
            return {}
        if not (
            isinstance(turning, int) and isinstance(width, int) and isinstance(heads, int) and heads > 0 and width >= heads
        ):
            raise SpecError("config.rotary_dim", f"{turning!r} is no number of channels of a head")
        return {"layers.*.mixer.position.fraction": turning / (width // heads)}


GPTJ = Dialect(
    name="gptj",
    forms=(
        Form(
            architecture="GPTJForCausalLM",
            prefix="transformer.",
            tensors=(Row("lm_head.weight", "head.table"), Row("lm_head.bias", "head.bias")),
        ),
    ),
    spec={
        "norm": "layernorm",
        "head": {"kind": "lm", "tied": False, "bias": True},
        "init": {"kind": "normal", "residual": False},
        "layers": [LAYER],
    },
    layers="n_layer",
    required=("vocab_size", "n_embd", "n_layer", "n_head"),
    fields=(
        Same("vocab_size", "vocab"),
        Same("n_embd", "width"),
        Same("n_head", "layers.*.mixer.heads"),
        Same("n_inner", "layers.*.ffn.hidden"),
        Same("layer_norm_epsilon", "norm.eps", "layers.*.norm.eps"),
        Same("resid_pdrop", "layers.*.wire.dropout"),
        Same("attn_pdrop", "layers.*.mixer.dropout"),
        Same("embd_pdrop", "dropout"),
        Same("tie_word_embeddings", "head.tied"),
        Same("initializer_range", "init.spread"),
        Named("activation_function", "layers.*.ffn.act", {"gelu_new": "gelu_tanh", **ACTIVATIONS}),
        RotaryDim(),
    ),
    tensors=(
        Row("wte.weight", "embed.table"),
        *rows("h.{}.ln_1", "layers.{}.norm", *LAYERNORM),
        *(Row(f"h.{{}}.attn.{name}_proj.weight", f"layers.{{}}.mixer.{name}.weight") for name in "qkv"),
        Row("h.{}.attn.out_proj.weight", "layers.{}.mixer.o.weight"),
        *rows("h.{}.mlp.fc_in", "layers.{}.ffn.up", "weight", "bias"),
        *rows("h.{}.mlp.fc_out", "layers.{}.ffn.down", "weight", "bias"),
        *rows("ln_f", "norm", *LAYERNORM),
    ),
    skips=(
        Skip("*.attn.bias", "the causal mask"),
        Skip("*.attn.masked_bias", "the score of masked keys"),
        Skip("*.attn.embed_positions", "rotary angles, computed from the config"),
    ),
    defaults={"rotary_dim": 64},
    ignored=HOUSEKEEPING
    | {
        "n_positions",
        "rotary",
        "scale_attn_weights",
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
        "task_specific_params",
    },
)
