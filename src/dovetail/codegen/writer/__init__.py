"""The writers; importing this registers all of them."""

from dovetail.codegen.writer import (
    act as act,
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
    norm as norm,
    position as position,
    rotary as rotary,
    scaling as scaling,
    wire as wire,
)
