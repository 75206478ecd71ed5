"""CodeGen: GPT-J with q, v and k packed in four blocks, one per core of the TPUs it was trained on (Nijkamp et al. 2022)."""

from __future__ import annotations

from typing import Any

from dovetail.hf.convert import Interleave
from dovetail.hf.dialect.gptj import GPTJ
from dovetail.hf.field import value_at
from dovetail.hf.table import Row
from dovetail.model.model import Model

BLOCKS = 4


def _heads_fill_blocks(spec: Model) -> tuple[str, Any, str] | None:
    """Their code splits the packed matrix into four blocks of whole heads."""
    heads = value_at(spec, "layers.*.mixer.heads")
    bad = isinstance(heads, int) and heads % BLOCKS
    return ("layers.0.mixer.heads", heads, f"it must be a multiple of {BLOCKS}") if bad else None


CODEGEN = GPTJ.variant(
    "codegen",
    architecture="CodeGenForCausalLM",
    without=tuple(f"h.{{}}.attn.{name}_proj.weight" for name in "qkv"),
    tensors=(
        Row(
            "h.{}.attn.qkv_proj.weight",
            *(f"layers.{{}}.mixer.{name}.weight" for name in "qvk"),
            convert=Interleave(BLOCKS),
        ),
    ),
    ignored=("n_ctx",),  # n_positions under an older name
    limits=(_heads_fill_blocks,),
)
