"""Names of causes and often confused values, per field.

A field without a row is tried all the same, from its type alone; the cause is then called by its path.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Word(NamedTuple):
    """The name of a cause, and values to try beside those that follow from the type of the field."""

    cause: str
    values: tuple[Any, ...] = ()


EPS = (1e-5, 1e-6, 1e-12, 1e-8, 1e-7, 1e-3, 1e-2)
BASES = (1e4, 5e5, 1e6, 1e5, 1e3, 500.0, 300.0, 100.0, 1.6e5, 5e6, 8e6, 1e7, 1.5e5)
SCALE = Word("score scale", (1.0,))
CAUSAL = Word("mask")
CAP = Word("soft-cap")
SCALED = Word("embedding scale", (1.0,))
ROUTER = Word("router's weights")

WORDS: dict[tuple[str, str], Word] = {
    ("rope", "pairs"): Word("rotary pair order"),
    ("rope", "base"): Word("rope base", BASES),
    ("rope", "fraction"): Word("rotary fraction", (1.0, 0.5, 0.25, 0.75)),
    ("rope", "scaling"): Word("rope scaling"),
    ("attention", "position"): Word("position missing"),
    ("attention", "scale"): SCALE,
    ("cross_attention", "scale"): SCALE,
    ("mla", "scale"): SCALE,
    ("attention", "softcap"): CAP,
    ("attention", "qk_norm"): Word("qk-norm missing"),
    ("attention", "qk_norm_whole"): Word("qk-norm over all heads"),
    ("attention", "mask"): CAUSAL,
    ("attention", "bias"): Word("bias missing"),
    ("attention", "out_bias"): Word("bias missing"),
    ("attention", "gate"): Word("output gate missing"),
    ("attention", "sink"): Word("sink missing"),
    ("window", "size"): Word("window size"),
    ("all_of", "masks"): Word("window missing"),
    ("rmsnorm", "plus_one"): Word("norm's + 1"),
    ("rmsnorm", "eps"): Word("norm's eps", EPS),
    ("layernorm", "eps"): Word("norm's eps", EPS),
    ("layernorm", "shift"): Word("bias missing"),
    ("block", "norm"): Word("kind of norm"),
    ("block", "wire"): Word("wiring"),
    ("glu", "act"): Word("activation"),
    ("mlp", "act"): Word("activation"),
    ("moe", "act"): Word("activation"),
    ("mlp", "bias"): Word("bias missing"),
    ("glu", "bias"): Word("bias missing"),
    ("pre_norm", "multiplier"): Word("residual scale", (1.0,)),
    ("softmax_router", "normalize"): ROUTER,
    ("sigmoid_router", "normalize"): ROUTER,
    ("softmax_router", "scale"): ROUTER,
    ("sigmoid_router", "scale"): ROUTER,
    ("softmax_router", "top_k"): Word("experts per token"),
    ("sigmoid_router", "top_k"): Word("experts per token"),
    ("tokens", "scale"): SCALED,
    ("tokens", "scale_by_width"): SCALED,
    ("tokens", "types"): Word("token types missing"),
    ("learned", "offset"): Word("position offset", (0, 1, 2)),
    ("model", "position"): Word("position missing"),
    ("model", "embed_norm"): Word("norm missing"),
    ("model", "norm"): Word("norm missing"),
    ("lm", "softcap"): CAP,
    ("lm", "scale"): Word("logit scale", (1.0,)),
    ("lm", "bias"): Word("bias missing"),
    ("masked_lm", "bias"): Word("bias missing"),
    ("masked_lm", "act"): Word("activation"),
}
STRETCHED = "rope scaling"  # every field of every scaling
PLURAL = {"scaling": STRETCHED}  # by group: the cause of every field of its parts


def word_of(kind: str, group: str, field: str, path: str) -> Word:
    """The row of a field, or one with its path as the name."""
    return WORDS.get((kind, field)) or Word(PLURAL.get(group, path))
