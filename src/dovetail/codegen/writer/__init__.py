"""The writers; importing this registers all of them."""

from dovetail.codegen.writer import (
    attention as attention,
    embed as embed,
    ffn as ffn,
    head as head,
    linear_attention as linear_attention,
    mamba as mamba,
    mask as mask,
    mla as mla,
    model as model,
    position as position,
    wire as wire,
)
