"""Mamba-2: Mamba with one decay per head; z, x, B, C and Δ in one matrix, x, B and C in one convolution (Dao & Gu 2024)."""

from __future__ import annotations

from typing import Any

from dovetail.base.errors import SpecError
from dovetail.hf.dialect.mamba import MAMBA
from dovetail.hf.field import Config, Copy, Field, Settings, value_at
from dovetail.hf.state_space import TIME_STEP_LIMIT, InnerWidth, TimeStepLimit, mamba2_rows, mamba_rows
from dovetail.model.model import Model

MIXER = "layers.{}.mixer"


class HeadCount(Field):
    """The number of heads, which fill the inner width."""

    names = ("num_heads",)

    def to_hf(self, spec: Model) -> dict[str, Any]:
        inner, head = value_at(spec, "layers.*.mixer.inner"), value_at(spec, "layers.*.mixer:mamba2.head")
        return {"num_heads": inner // head} if isinstance(inner, int) and isinstance(head, int) else {}

    def from_hf(self, config: Config) -> Settings:
        count, head = config.get("num_heads"), config.get("head_dim")
        inner = InnerWidth("expand", "inner").from_hf(config)["inner"]
        if isinstance(count, int) and isinstance(head, int) and count * head != inner:
            raise SpecError("config.num_heads", f"{count} heads of {head} do not fill the inner width, {inner}")
        return {}


MAMBA2 = MAMBA.variant(
    "mamba2",
    architecture="Mamba2ForCausalLM",
    layer={"mixer": {"kind": "mamba2", "bias": False}},
    without=tuple(row.hf_name for row in mamba_rows(MIXER, MIXER)),
    fields=(
        Copy("head_dim", "layers.*.mixer.head"),
        HeadCount(),
        TimeStepLimit("layers.*.mixer"),
        Copy("n_groups", "layers.*.mixer.groups"),
        Copy("layer_norm_epsilon", "norm.eps", "layers.*.norm.eps", "layers.*.mixer.norm.eps"),
        InnerWidth("expand", "layers.*.mixer.inner"),
    ),
    tensors=mamba2_rows(MIXER, MIXER),
    fixed={"use_bias": False},  # theirs has two biases on Δ that are added
    infinite=frozenset({TIME_STEP_LIMIT}),
    ignored=("chunk_size", "time_step_rank"),
    defaults={"initializer_range": 0.1, "head_dim": 64, "n_groups": 8, "state_size": 128, "tie_word_embeddings": False},
)
