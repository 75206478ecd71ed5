"""GPT-J: attention and FFN in parallel after one norm; RoPE on adjacent channels (Wang & Komatsuzaki 2021)."""

from __future__ import annotations

from typing import Any

from dovetail.base.errors import SpecError
from dovetail.hf.dialect.gpt2 import FIELDS, SUMMARY
from dovetail.hf.field import Config, Field, Settings, value_at
from dovetail.hf.table import HOUSEKEEPING, LAYERNORM, Dialect, Form, Row, Skip, rows
from dovetail.model.model import Model

ROPE = {"kind": "rope", "pairs": "adjacent"}
LAYER = {
    "norm": "layernorm",
    "wire": "parallel",
    "mixer": {"kind": "attention", "position": ROPE},
    "ffn": {"kind": "mlp", "act": "gelu_tanh"},
}


class RotaryDim(Field):
    """The number of rotated channels of a head; null is all of them."""

    names = ("rotary_dim",)

    def to_hf(self, spec: Model) -> dict[str, Any]:
        share, head = value_at(spec, "layers.*.mixer.position.fraction"), value_at(spec, "layers.*.mixer.head")
        both = isinstance(share, float) and isinstance(head, int)
        return {self.names[0]: round(share * head)} if both else {}

    def from_hf(self, config: Config) -> Settings:
        channels, width, heads = config.get("rotary_dim"), config.get("n_embd"), config.get("n_head")
        if channels is None:
            return {}
        if not (
            isinstance(channels, int) and isinstance(width, int) and isinstance(heads, int) and heads > 0 and width >= heads
        ):
            raise SpecError("config.rotary_dim", f"{channels!r} is not a number of channels of a head")
        return {"layers.*.mixer.position.fraction": channels / (width // heads)}


GPTJ = Dialect(
    name="gptj",
    forms=(
        Form(
            architecture="GPTJForCausalLM",
            prefix="transformer.",
            tensors=(Row("lm_head.weight", "head.out.weight"), Row("lm_head.bias", "head.bias")),
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
        *FIELDS,
        RotaryDim(),
    ),
    tensors=(
        Row("wte.weight", "embed.table"),
        *rows("h.{}.ln_1", "layers.{}.norm", *LAYERNORM),
        *(Row(f"h.{{}}.attn.{name}_proj.weight", f"layers.{{}}.mixer.{name}.weight") for name in "qkv"),
        Row("h.{}.attn.out_proj.weight", "layers.{}.mixer.o.weight"),
        *rows("h.{}.mlp.fc_in", "layers.{}.ffn.up"),
        *rows("h.{}.mlp.fc_out", "layers.{}.ffn.down"),
        *rows("ln_f", "norm", *LAYERNORM),
    ),
    skips=(
        Skip("*.attn.bias", "the causal mask"),
        Skip("*.attn.masked_bias", "the score of masked keys"),
        Skip("*.attn.embed_positions", "rotary angles, computed from the config"),
    ),
    defaults={"rotary_dim": 64},
    ignored=HOUSEKEEPING | {"n_positions", "rotary", "scale_attn_weights", *SUMMARY},
)
