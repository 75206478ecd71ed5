"""The writers; importing this registers all of them."""

from dovetail.codegen.writer import (
    attention as attention,
    embed as embed,
    ffn as ffn,
    gated_deltanet as gated_deltanet,
    head as head,
    linear_attention as linear_attention,
    mamba as mamba,
    mamba2 as mamba2,
    mask as mask,
    mla as mla,
    model as model,
    moe as moe,
    position as position,
    scaling as scaling,
    wire as wire,
)
