"""Small specs, each with one thing that sharding must get right. Sizes are all different, and cut by 2."""

ATTENTION = "kind: attention, heads: 6, kv_heads: 2, head: 12"


def decoder(attention: str = ATTENTION, layer: str = "", model: str = "", ffn: str = "kind: glu, hidden: 44") -> str:
    """A decoder of two layers as YAML, with more fields for its attention, layers and model."""
    return f"""
width: 28
vocab: 62
{model}
layers:
  - repeat: 2
    mixer: {{{attention}}}
    ffn: {{{ffn}}}
    {layer}
"""


def encoder_decoder(mixer: str, cross: str, embed: str) -> str:
    """An encoder–decoder of two layers each, tables and all."""
    return f"""
width: 28
vocab: 62
encoder:
  width: 20
  vocab: 62
  embed: {embed}
  head: null
  layers:
    - repeat: 2
      mixer: {{kind: attention, heads: 4, head: 10, mask: full, {mixer}}}
      ffn: {{kind: mlp, hidden: 36}}
layers:
  - repeat: 2
    mixer: {{{ATTENTION}, {mixer}}}
    cross: {{kind: cross_attention, heads: 6, kv_heads: 2, head: 12, {cross}}}
    ffn: {{kind: glu, hidden: 44}}
"""


RELATIVE = "position: {kind: t5_bias, buckets: 8, max_distance: 16}"
ROUTED = "kind: moe, experts: 4, hidden: 18, router: {kind: sigmoid_router, top_k: 2, balance_bias: true}"
GPT2 = decoder(
    "kind: attention, heads: 6, head: 12, packed: true, bias: true, out_bias: true, position: none",
    "norm: layernorm",
    "position: {kind: learned, length: 64}\nnorm: layernorm\nhead: {kind: lm, tied: false, bias: true}",
    "kind: mlp, hidden: 44",
)
WIRINGS = {
    "llama": decoder(),
    "gpt2": GPT2,
    "relative": decoder(f"{ATTENTION}, {RELATIVE}"),
    "alibi": decoder(f"{ATTENTION}, position: alibi"),
    "qk_norm": decoder(f"{ATTENTION}, qk_norm: rmsnorm"),
    "qk_norm_whole": decoder(f"{ATTENTION}, qk_norm: rmsnorm, qk_norm_whole: true"),
    "qk_layernorm_whole": decoder(f"{ATTENTION}, qk_norm: layernorm, qk_norm_whole: true"),
    "sink_gate_bias": decoder(f"{ATTENTION}, sink: true, gate: true, bias: true, out_bias: true"),
    "packed": decoder(f"{ATTENTION}, packed: true, bias: true"),
    "one_kv_head": decoder("kind: attention, heads: 6, kv_heads: 1, head: 12, bias: true, qk_norm: layernorm"),
    "untied": decoder(model="head: {kind: lm, tied: false}"),
    "by_head": decoder(
        "kind: attention, heads: 4, head: 12, mask: [causal, {kind: by_head, masks: [{kind: window, size: 2},"
        " {kind: window, size: 3}, full, {kind: window, size: 5}]}]"
    ),
    "window_softcap": decoder(f"{ATTENTION}, softcap: 2.0, mask: [causal, {{kind: window, size: 4, keep: 1}}]"),
    "glu_bias_parallel": decoder(layer="wire: {kind: parallel, layer_scale: 0.7}", ffn="kind: glu, hidden: 44, bias: true"),
    "rope_on_read": decoder(f"{ATTENTION}, position: {{kind: rope, when: read}}"),
    "encoder": decoder(
        f"{ATTENTION}, mask: full",
        "wire: post_norm\n    norm: layernorm",
        "embed: {kind: tokens, types: 2}\nhead: masked_lm\nnorm: null\nembed_norm: layernorm",
    ),
    "shared_layers": decoder(ffn=ROUTED)
    + f"""  - shares: 0
    mixer: {{{ATTENTION}}}
    ffn: {{{ROUTED}}}
""",
    "encoder_decoder": encoder_decoder("qk_norm: rmsnorm", "qk_norm: rmsnorm, out_bias: true", "tokens"),
    "encoder_decoder_relative": encoder_decoder(RELATIVE, "bias: true", "tokens"),
}
ROWS_ONLY = {  # a row must stay whole: it is pooled, or cut from an image
    "classifier": decoder(f"{ATTENTION}, mask: full", model="head: {kind: classifier, classes: 3, pooling: mean}"),
    "vision": decoder(
        f"{ATTENTION}, mask: full, position: {{kind: rope, coords: 2}}",
        model="embed: {kind: patches, image: 12, patch: 3, channels: 2}\nhead: {kind: classifier, classes: 3}",
    ),
}
