"""The parts that come with Dovetail: one line each file. A user's package adds its own by the entry point `dovetail.parts`."""

from importlib.metadata import entry_points

from dovetail.parts import act, embed, feature, head, init, norm, wire
from dovetail.parts.ffn import glu, mlp, moe, router
from dovetail.parts.mask import join, near, sparse
from dovetail.parts.mixer import (
    additive,
    attention,
    cells,
    gated_deltanet,
    gla,
    linear_attention,
    linformer,
    mamba,
    mamba2,
    mla,
    nsa,
    rwkv6,
    s4,
)
from dovetail.parts.position import alibi, learned, none, rope, scaling, sinusoidal, streaming, t5_bias

__all__ = [
    "act",
    "additive",
    "alibi",
    "attention",
    "cells",
    "embed",
    "feature",
    "gated_deltanet",
    "gla",
    "glu",
    "head",
    "init",
    "join",
    "mla",
    "learned",
    "linear_attention",
    "linformer",
    "mamba",
    "mamba2",
    "mlp",
    "moe",
    "nsa",
    "near",
    "none",
    "norm",
    "t5_bias",
    "rope",
    "router",
    "rwkv6",
    "s4",
    "scaling",
    "sinusoidal",
    "sparse",
    "streaming",
    "wire",
]

for offered in entry_points(group="dovetail.parts"):
    offered.load()
